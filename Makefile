PY = .venv/bin/python

.PHONY: check test bench
check:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check planner probes search reports tests benchmarks
	$(PY) -m mypy
	$(PY) -m pytest tests/test_imports.py
test:
	$(PY) -m pytest
bench:
	$(PY) benchmarks/run_all.py
