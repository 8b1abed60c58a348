"""The checkpoint that a run resumes from: the newest that can be read, in its directory or on the hosts' own disks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.checkpoint.together import gathered
from jaxfb.process.position import here
from jaxfb.refusal import Missing, Refused
from jaxfb.training.guard import listed, trained, unsound_leaves
from jaxfb.training.persistence.changes import check_changes
from jaxfb.training.persistence.local_tier import LocalTier, local_tier
from jaxfb.training.run_dir import RunDirectory

if TYPE_CHECKING:
    from jaxfb.training.work import Work


class Found(NamedTuple):
    """A checkpoint that was read: its state, its other values, and whether it comes from the hosts' own disks."""

    state: Any
    record: dict[str, Any]
    is_local: bool


class CheckpointSources:
    """The two places where a run's checkpoints lie, read by all processes together.

    allow_changes: accept a config that gives the saved parameters or rows another meaning.
    local:         the checkpoints on the hosts' own disks, once `newest` has looked for them; None without them.
    """

    def __init__(self, work: Work, directory: RunDirectory, store: CheckpointStore, allow_changes: bool):
        self._work, self._directory, self._store = work, directory, store
        self._allow_changes = allow_changes
        self.local: LocalTier | None = None

    def newest(self) -> Found | None:
        """Returns the newest checkpoint that can be read; None where the run has none yet.

        Raises:
          ValueError: it does not fit the config, is not finite, or the checkpoints of a saved run are gone.
        """
        self.local = self._local_tier()
        if found := self._newest_local():
            return found
        if self._directory.newest_update() is None:
            self._directory.refuse_lost()
            return None
        return self._newest_sound()

    def _newest_sound(self) -> Found:
        """Returns the newest that can be read, where no local one is newer than the run directory's.

        If those turn out to be damaged, local ones that are newer than what can be read there count again.
        """
        newest = set(gathered(self._store.latest()))  # a process may not see one yet
        try:
            found = self._newest_saved()
            if self.local is None or newest == {found.record["update"]}:
                return found
            jax.tree.map(lambda leaf: leaf.delete(), found.state)  # there may be memory for one state alone
        except Missing:
            if newest == {None} or (local := self._newest_local()) is None:
                raise
            return local
        return self._newest_local() or self._newest_saved()

    def _newest_saved(self) -> Found:
        """Returns the newest checkpoint in the run directory that can be read."""
        here.enter("restoring")
        newest = self._store.latest()
        abstract = self._work.abstract_state()
        if newest is not None:  # before arrays are read, which may take minutes
            self._check_newest(newest, abstract)
        state, record = self._store.restore(abstract)
        if record["update"] != newest:
            self._check(record)
        self._check_finite(state, record["update"])
        return Found(state, record, False)

    def _newest_local(self) -> Found | None:
        """Returns the newest local checkpoint; None where the run directory has a newer one."""
        if self.local is None:
            return None
        here.enter("restoring")
        newest, abstract = self._store.latest(), self._work.abstract_state()
        found = self.local.restore(newest, abstract)
        if not found or found[0] <= (-1 if newest is None else newest):
            return None
        update, state, record = found
        self._check(record)
        if unsound_leaves(trained(state)):
            return None
        self._work.say(f"update {update} is read from the hosts' own disks")
        return Found(state, record, True)

    def _local_tier(self) -> LocalTier | None:
        settings = self._work.config.checkpoint.local
        if settings is None or not gathered(self._directory.has_identity)[0]:
            return None
        return local_tier(settings, self._directory, new=False, say=self._work.say)

    def _check_newest(self, step: int, abstract: Any) -> None:
        """Refuses by key before by shape; arrays of other shapes cannot be allowed, so that is not offered then."""
        record, misfit = self._store.host(step), None
        if "plan" not in record:
            raise Refused(
                f"[run] dir={self._directory.path} contains an imported model that was not trained yet, so there is "
                "nothing to resume; choose another run.dir"
            )
        try:
            self._store.check_fit(abstract, step)
        except ValueError as error:
            misfit = error
        self._check(record, fits=misfit is None)
        if misfit is not None:
            raise misfit

    def _check(self, record: dict[str, Any], fits: bool = True) -> None:
        if not self._allow_changes:
            check_changes(record["config"], self._work.config, record["update"], offer=fits)
        self._work.check_resume(record, self._allow_changes)

    def _check_finite(self, state: Any, update: int) -> None:
        """Refuses a state with a nan or an inf in it, with the earlier checkpoints to continue from."""
        if bad := unsound_leaves(trained(state)):
            earlier = [step for step in self._store.steps() if step < update]
            others = f" ({', '.join(map(str, earlier))})" if earlier else ", of which there is none"
            raise Refused(
                f"[checkpoint] update {update} of {self._directory.checkpoints} is not finite in {listed(bad)}; "
                f"move its directory away to continue from an earlier one{others}"
            )
