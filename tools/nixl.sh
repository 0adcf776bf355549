#!/bin/sh
# The tests of wire nixl over UCX on this machine's CPU. Makes .venv-nixl, which sees .venv and adds NIXL.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv-nixl/.installed
wanted=$(cat requirements/nixl.txt requirements/cpu.txt | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    .venv/bin/uv venv --quiet --allow-existing --python .venv/bin/python .venv-nixl
    .venv/bin/uv pip install --quiet --python .venv-nixl/bin/python --no-deps --require-hashes -r requirements/nixl.txt
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    # addsitedir, and not the path alone: .venv holds the checkout by a .pth file of its own.
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$site")')" > "$(.venv-nixl/bin/python -c "$site")/beside.pth"
    echo "$wanted" > "$stamp"
fi
# What UCX listens on does so on loopback.
UCX_NET_DEVICES=lo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
    exec .venv-nixl/bin/python -m tests.run "$@"
