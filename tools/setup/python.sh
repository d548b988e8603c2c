#!/usr/bin/env bash
# Makes a Python environment with what a requirements file pins: tools/setup/python.sh [VENV REQUIREMENTS MODULES]; without
# arguments .venv, for the tests. The stamp is written last, so an interrupted run is started afresh; it names the Python
# too, so another one (or one that was removed) does.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv}
requirements=${2:-tools/setup/requirements.txt}
modules=${3:-huggingface_hub, onnx.checker, onnxruntime.quantization.matmul_nbits_quantizer}
wanted=$(python3 -c 'import sys; print(sys.version)'; sha256sum "$requirements")

if [[ -e $venv/ready && $(<"$venv/ready") == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "python: error: these Python packages need Python 3.11 or later; python3 is $(python3 -V)" >&2; exit 1; }
echo "python: making $venv" >&2
rm -rf "$venv"
python3 -m venv "$venv" ||
    { echo "python: error: no venv; on Debian: apt-get install python3-venv" >&2; exit 1; }
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: -r "$requirements"
"$venv/bin/python" -m pip check --disable-pip-version-check >&2 # --no-deps: the list must be whole
"$venv/bin/python" -c "import $modules"
printf '%s\n' "$wanted" >"$venv/ready"
