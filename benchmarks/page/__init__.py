"""docs/performance.md in parts: sections by topic, tables, pictures; `benchmarks/performance.py` joins them."""
