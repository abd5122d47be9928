PY = .venv/bin/python

.PHONY: check test whole bench docs fuzz mutants faults audit
check:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check finetune_planner planner probes search reports tests benchmarks
	$(PY) -m mypy
	$(PY) -m mypy tools/faults.py tools/fuzz.py tools/mutation.py tools/trace_kills.py
	$(PY) -m pytest tests/test_imports.py
test:
	$(PY) -m pytest
whole: # also the cases of products that the default tests leave out (tests/whole.py)
	TESTS_WHOLE=1 $(PY) -m pytest
bench: # the benchmarks that time something (docs/accuracy holds what the others write)
	for one in allocator startup throughput dryrun probe search report; do $(PY) -m benchmarks.bench_$$one || exit 1; done
docs: # docs/ as a site in build/site, every link and anchor checked; a venv of its own
	test -x .docs/bin/mkdocs || { $(PY) -m venv .docs && .docs/bin/python -m pip install --quiet "mkdocs-material>=9.6,<10"; }
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict
fuzz: # 7,500 hostile inputs to every command that reads something (docs/faults.md)
	$(PY) tools/fuzz.py
mutants: # 213 planted faults, each against its room's tests (docs/faults.md)
	$(PY) tools/mutation.py
faults: # kills, full disks, read-only homes and restarted databases under real searches (docs/faults.md)
	$(PY) tools/faults.py
	$(PY) tools/trace_kills.py 60
audit: # known vulnerabilities of the tested set; a venv of its own; --strict: what could not be asked about is no pass
	test -x .audit/bin/pip-audit || { $(PY) -m venv .audit && .audit/bin/python -m pip install --quiet pip-audit; }
	.audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip --strict
