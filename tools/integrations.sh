#!/bin/sh
# Tests against packages that the tests' environment leaves out. Makes .venv-integrations, which sees .venv's packages behind its own.
set -eu
cd "$(dirname "$0")/.."
packages="ray==2.60.0 msgpack==1.2.4 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 multiprocess==0.70.19 xxhash==4.1.0 python-dateutil==4.0.0 pytz==2026.6"
stamp=.venv-integrations/.installed
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$packages" ]; then
    .venv/bin/uv venv --quiet --allow-existing --python .venv/bin/python .venv-integrations
    for site in .venv-integrations/lib/python3.*/site-packages; do
        echo "$PWD/.venv/lib/$(basename "$(dirname "$site")")/site-packages" > "$site/behind.pth"
    done
    # --no-deps: what these need beside is in .venv. --no-config: the overrides of pyproject.toml leave some of them out.
    .venv/bin/uv pip install --quiet --no-config --python .venv-integrations/bin/python --no-deps $packages
    echo "$packages" > "$stamp"
fi
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONPATH=. exec .venv-integrations/bin/python -m pytest -q tests/integrations "$@"
