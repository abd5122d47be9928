PY = .venv/bin/python

.PHONY: check test whole bench docs fuzz mutants faults lock audit release
check:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check finetune_planner planner probes search reports tests benchmarks
	$(PY) -m mypy
	$(PY) -m mypy -m tools.faults -m tools.fuzz -m tools.fuzz_doors -m tools.mutation -m tools.trace_kills -m tools.command_kills
	$(PY) -m pytest tests/test_imports.py
test:
	$(PY) -m pytest
whole: # also the cases of products that the default tests leave out (tests/whole.py)
	TESTS_WHOLE=1 $(PY) -m pytest
bench: # the benchmarks that time something (docs/accuracy holds what the others write)
	for what in startup dryrun search; do $(PY) -m benchmarks.timings $$what || exit 1; done
docs: # docs/ as a site in build/site, every link and anchor checked; a venv of its own
	test -x .docs/bin/mkdocs || { $(PY) -m venv .docs && .docs/bin/python -m pip install --quiet "mkdocs-material>=9.6,<10"; }
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict
# What one evening has: fuzz, mutants and faults together take 30 CPU minutes at most, take some of every kind first, and
# say what they left out and how to go on (docs/faults.md has the whole ones)
RECORDS = build/records/$(shell git rev-parse --short HEAD)
fuzz: # hostile inputs to every command that reads something
	$(PY) tools/fuzz.py --spread --cpu-seconds 480
mutants: # planted faults, each against its room's tests; a second call on the same commit goes on
	mkdir -p $(dir $(RECORDS))
	$(PY) tools/mutation.py --cpu-seconds 660 --record $(RECORDS)-mutants.jsonl
faults: # kills, full disks, read-only homes and restarted databases under real searches; likewise
	mkdir -p $(dir $(RECORDS))
	$(PY) tools/faults.py --kills 24 --every 12 --restarts 1 --cpu-seconds 440 --record $(RECORDS)-faults.jsonl
	$(PY) tools/trace_kills.py 60
	$(PY) tools/command_kills.py 42
lock: # requirements.lock: the tested set with the hash of every file of it, whatever the platform; after a change of it
	.venv/bin/uv pip compile -q --generate-hashes --no-header --no-deps --no-annotate constraints.txt -o requirements.lock
release: check whole audit # what a release waits for, the vulnerabilities of its own set among it
audit: # known vulnerabilities of the tested set; a venv of its own; --strict: what could not be asked about is no pass
	test -x .audit/bin/pip-audit || { $(PY) -m venv .audit && .audit/bin/python -m pip install --quiet pip-audit; }
	.audit/bin/pip-audit -r requirements.lock --require-hashes --disable-pip --strict
