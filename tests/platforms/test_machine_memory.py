"""The memory of this machine, and of a container that it runs in."""

from jaxfb.platforms import machine_memory


def test_the_memory_of_this_machine_is_known():
    assert machine_memory.host_memory() > 2**28


def test_a_container_may_use_less_than_the_machine_has(tmp_path, monkeypatch):
    for text, size in (("1000000\n", 1_000_000), ("max\n", machine_memory.host_memory())):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)
        assert machine_memory.host_memory() == size


def test_what_is_free_is_the_least_of_machine_and_container(tmp_path, monkeypatch):
    machines = machine_memory.free_memory()
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\nSwapFree: 70 kB\n")
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)
    assert machine_memory.free_memory() == 5000 * 1024 != machines and machine_memory.free_swap() == 70 * 1024
    for name, text in (
        ("max", "1000000\n"),
        ("current", "900000\n"),
        ("stat", "anon 5\ninactive_file 200000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert machine_memory.free_memory() == 300_000
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "nothing")
    assert machine_memory.free_memory() == 300_000 and machine_memory.free_swap() == 0
