#!/bin/sh
# The unit tests of what a trainer imports, on the oldest Python that the packages allow. Makes .venv-oldest.
set -eu
cd "$(dirname "$0")/.."
oldest=$(sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
python=
for candidate in "python$oldest" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$oldest".*/bin/python3; do
    if "$candidate" -c 'import sys' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || {
    echo "SKIPPED: no Python $oldest on this machine; the unit tests of the trainer's half did not run on it"
    exit 0
}
stamp=.venv-oldest/.installed
wanted=$(cat requirements/oldest.txt | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    .venv/bin/uv venv --quiet --allow-existing --python "$python" .venv-oldest
    .venv/bin/uv pip sync --quiet --python .venv-oldest/bin/python --require-hashes requirements/oldest.txt
    echo "$wanted" > "$stamp"
fi
OMP_NUM_THREADS=1 PYTHONPATH=. exec .venv-oldest/bin/python -m pytest -q -p no:cacheprovider "$@"
