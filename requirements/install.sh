#!/usr/bin/env bash
# Make .venv once: `make install` calls this. A stamp named after the lock, pyproject.toml and this script makes later calls return at once.
# PYTHON=... picks the interpreter, FLAVOUR=cpu|cuda the lock; unset: cuda where nvidia-smi answers, else cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=0.13.9

die() { echo "vime install: $*" >&2; exit 1; }

if [ -z "${FLAVOUR:-}" ]; then
  FLAVOUR=cpu; command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU && FLAVOUR=cuda
fi
case $FLAVOUR in
  cpu) newest=14 oldest=11 pythons="python3.11 python3.12 python3.13 python3.14 python3" ;;
  cuda) newest=13 oldest=12 pythons="python3.12 python3.13 python3" ;;
  *) die "FLAVOUR=$FLAVOUR is neither cpu nor cuda" ;;
esac
lock=requirements/$FLAVOUR.txt
stamp=.venv/.vime-$FLAVOUR-$(cat "$lock" pyproject.toml requirements/install.sh | sha256sum | cut -c1-12)
here=$(pwd -P)
if grep -qF "$here/.venv" .venv/pyvenv.cfg 2>/dev/null; then
  [ ! -e "$stamp" ] || exit 0
  clear=
else
  [ ! -L .venv ] || die ".venv is a link to $(readlink -f .venv), an environment of another folder, and would be emptied: remove the link"
  clear=--clear  # none yet, or one made in another folder, whose scripts point there
fi
[ "$(uname -sm)" = "Linux x86_64" ] || die "there are vLLM wheels for Linux on x86_64 only, this is $(uname -sm); use a Linux machine or container"

usable() { "$1" -c "import sys, ensurepip; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; }
py=
for candidate in ${PYTHON:-$pythons}; do if usable "$candidate"; then py=$candidate; break; fi; done
[ -n "$py" ] || die "no Python 3.$oldest to 3.$newest with ensurepip among: ${PYTHON:-$pythons}; install one (Debian: python3.$oldest-venv) or name it: make install PYTHON=/path/to/python"
if [ -z "$clear" ] && ! .venv/bin/python -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; then
  clear=--clear
fi

begin=$SECONDS
step() { printf '[%d/4 %3d s] %s\n' "$1" $((SECONDS - begin)) "$2"; }
# A terminal gets the progress bars of pip and uv. A log gets the big downloads only, and no list of packages.
tidy() { if [ -t 1 ] && [ -t 2 ]; then "$@"; else "$@" 2>&1 | { grep -vE '^( [-+~] | Downloaded |Downloading .*\([0-9.]{3}[KM]iB\)|Looking in |Requirement already )' || true; }; fi; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if [ -n "$clear" ] || [ ! -x .venv/bin/pip ]; then
  step 1 "environment .venv with $("$py" --version), uv $UV"
  "$py" -m venv $clear .venv
else
  step 1 "environment .venv is there, uv $UV"
fi
pip install -q "uv==$UV"

torch=$(grep '^torch==' "$lock")
if [ $FLAVOUR = cpu ]; then
  # By pip, which skips an index it can't reach (uv stops there). "+cpu" matches a CPU wheel only: from pytorch.org, or a --find-links folder of pip's
  step 2 "$torch, about 200 MB"
  tidy pip install --no-deps --no-compile --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu "$torch" ||
    die "$torch could not be installed, see above; it comes from https://download.pytorch.org/whl/cpu: is that host reachable from here?"
else
  step 2 "$torch and CUDA libraries, several GB: with the rest"
fi

step 3 "$(grep -c == "$lock") packages of $lock"
if ! tidy .venv/bin/uv pip install -p .venv --no-deps -r "$lock"; then
  echo "uv failed (does it know your proxy or mirror? it reads UV_INDEX_URL, not pip's settings); trying pip, which is slower"
  tidy pip install --no-deps --no-compile -r "$lock"
fi

step 4 "vime itself"
pip install -q --no-deps --no-build-isolation -e .
rm -f .venv/.vime-*
touch "$stamp"
step 4 "done; \`.venv/bin/vime doctor\` checks this machine"
