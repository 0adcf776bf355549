# Two commands from a fresh clone with python3, pip and make: `make demo` and `make test`. Each sets up .venv by itself.
.PHONY: .setup demo scenarios test test-all test-unit test-engine test-gpu test-nixl test-oldest test-integrations lint bench-planning pins clean

# torch asks the name service for the name of every address that it connects to: an answer that is lost costs a second, not five.
RUN = RES_OPTIONS="timeout:1 attempts:1" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 .venv/bin/python
# Each file in a process of its own, one more than there are cores at a time, and a table of their times.
FILES = $(RUN) -m tests.run
UNIT = $(wildcard tests/unit/test_*.py) tests/unit/kernels tests/gpu
SHORT = $(shell grep -L "^pytestmark = .*mark.long" tests/engine/test_*.py)

# What a trainer imports, on the oldest Python allowed.
OLDEST = $(addprefix tests/unit/test_,$(addsuffix .py,config_sender digest ipc plan ranks recipes residency seam_agree shm source_import))

demo: .setup           ## the main job: train, sample and refit on this machine's CPU
	$(RUN) examples/colocated_sync_rl.py

scenarios: .setup      ## what versions are for: seven scenarios on this machine's CPU, a JSON file each
	$(RUN) benchmarks/scenarios.py

test: .setup lint      ## lint, types and the tests of this machine, but for the longest
	@tools/oldest.sh tests/unit/test_digest.py tests/unit/test_plan.py tests/unit/test_shm.py tests/unit/test_residency.py
	$(FILES) $(SHORT) $(UNIT)

test-all: .setup lint  ## the longest too
	@tools/oldest.sh $(OLDEST)
	$(FILES) $(wildcard tests/engine/test_*.py) $(UNIT) -- -m "not full_size"

test-unit: .setup      ## pure tests, in a few minutes
	$(FILES) $(UNIT)

test-oldest: .setup    ## unit tests of what a trainer imports, on the oldest Python; a part of `make test` runs the cheapest
	@tools/oldest.sh $(OLDEST)

test-nixl: .setup      ## wire nixl over UCX on a CPU, in an environment of its own (59 MB to fetch)
	@tools/nixl.sh tests/unit/test_nixl.py tests/engine/test_nixl.py

test-engine: .setup    ## real vLLM engines and real Megatron, on a CPU
	$(FILES) $(SHORT)

test-gpu: .setup       ## on a machine with an NVIDIA GPU
	$(RUN) -m pytest tests/gpu

test-integrations: .setup  ## against Ray and TRL, in an environment of their own; not part of `make test`
	@tools/integrations.sh

lint: .setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/codespell

bench-planning: .setup ## routes and plans at full published size
	$(RUN) benchmarks/planning.py

pins: .setup           ## compile requirements/*.txt anew from pyproject.toml
	.venv/bin/uv pip compile pyproject.toml --extra cpu --extra dev --generate-hashes --no-header --no-emit-index-url --upgrade -o requirements/cpu.txt
	.venv/bin/uv pip compile pyproject.toml --generate-hashes --no-header --no-emit-index-url --upgrade -o requirements/base.txt
	printf 'torch==2.13.0\npytest>=8.3\npytest-timeout>=2.3\nhypothesis>=6.115\nml_dtypes>=0.5\n' | .venv/bin/uv pip compile pyproject.toml - --python-version 3.10 --generate-hashes --no-header --no-emit-index-url --upgrade -o requirements/oldest.txt
	.venv/bin/uv pip compile pyproject.toml --extra gpu --extra plot --no-config --override requirements/gpu-overrides.txt -c requirements/gpu-constraints.txt --generate-hashes --no-header --no-emit-index-url --upgrade -o requirements/gpu.txt
	grep '^uv==' requirements/cpu.txt | sed 's/ .*//' | .venv/bin/uv pip compile - --generate-hashes --no-header --no-emit-index-url -o requirements/uv.txt

.setup:
	@tools/setup.sh

clean:
	rm -rf .venv .venv-nixl .venv-oldest out
