#!/usr/bin/env bash
# Makes .venv ready for one of two uses and says which torch it took:
#
#   scripts/setup.sh run    what `yunque` itself needs
#   scripts/setup.sh dev    that, and what `make check` and `make test` need
#
# Repeating it costs nothing: a stamp in .venv names the inputs it was made from. Interrupting it costs nothing either:
# the marker .venv.incomplete stands beside .venv from the first change until the last check, and whoever finds it
# there starts from an empty .venv (downloads are cached, so that is quick).
#
# Choosing torch: UV_FIND_LINKS or PIP_FIND_LINKS (a folder or page that holds a torch wheel) comes first; else
# UV_TORCH_BACKEND (cpu, cu130, ...; default auto: what the GPU driver asks for); else the default package index.
# PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile="${1:-dev}"
case "$profile" in
  run) target="." ;;
  dev) target=".[dev]" ;;
  *) echo "setup: unknown profile '$profile'; valid: run, dev" >&2; exit 2 ;;
esac

stamp_of() { # of a profile: changes with the inputs and with the place of the clone
  echo ".venv/.yunque-$1-$( (pwd; cat pyproject.toml constraints.txt scripts/setup.sh) | cksum | cut -d' ' -f1)"
}
if [ ! -e .venv.incomplete ] && [ -x .venv/bin/python ]; then
  if [ -e "$(stamp_of dev)" ] || [ -e "$(stamp_of "$profile")" ]; then exit 0; fi
fi

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "no Python 3.11 or newer found (tried ${PYTHON:+$PYTHON, }python3, python3.13, python3.12, python3.11, python)." \
    "Install one, or name it: PYTHON=/path/to/python3 make setup"
}

make_venv() {
  if [ -e .venv.incomplete ]; then
    [ ! -e .venv ] || say "an earlier set-up was interrupted: starting from an empty .venv"
    rm -rf .venv
  fi
  : > .venv.incomplete
  if ! [ -x .venv/bin/python ]; then
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv > "$log" 2>&1 || { cat "$log" >&2; fail "could not make .venv (on Debian and Ubuntu: apt install python3-venv)"; }
  fi
  .venv/bin/python -m pip install -q --disable-pip-version-check 'uv>=0.9' || fail "could not install uv into .venv"
}

if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"; fi
uv_install() { .venv/bin/uv pip install --python .venv -c constraints.txt "$@"; }

install_torch() { # sets $source
  local links="${UV_FIND_LINKS:-}" backend="${UV_TORCH_BACKEND:-auto}" quiet="-q"
  unset UV_FIND_LINKS UV_TORCH_BACKEND
  if uv_install -q --no-deps --no-index torch 2> /dev/null; then
    source="what .venv already had"
    return
  fi
  if [ -z "$links" ] && [ -n "${PIP_FIND_LINKS:-}" ]; then
    local words IFS # pip separates by spaces, uv by commas
    read -r -a words <<< "$PIP_FIND_LINKS"
    IFS=,
    links="${words[*]}"
    unset IFS
  fi
  if [ -n "$links" ]; then
    export UV_FIND_LINKS="$links"
    if uv_install -q --no-deps --no-index torch 2> /dev/null; then
      source="find-links"
      return
    fi
    say "find-links hold no fitting torch wheel; looking further"
  fi
  if [ -t 2 ]; then quiet=""; fi
  say "installing torch (backend $backend)"
  if uv_install $quiet --torch-backend "$backend" torch 2> "$([ -t 2 ] && echo /dev/stderr || echo "$log")"; then
    source="the PyTorch index, backend $backend"
    return
  fi
  [ "$backend" = auto ] || { cat "$log" >&2; fail "could not install torch with UV_TORCH_BACKEND=$backend"; }
  say "the PyTorch index cannot be used ($(sed -n '/cause:/{s/.*cause: *//p;q;}' "$log")): taking torch from the default package index."
  if [ "$(uname -sm)" = "Linux x86_64" ]; then
    say "that is the CUDA build, about 2.8 GB to download. For the CPU build (0.2 GB) stop here and set UV_FIND_LINKS to a folder with its wheel"
  fi
  uv_install $quiet torch || fail "could not install torch"
  source="the default package index"
}

SECONDS=0
make_venv
install_torch
say "installing the rest ($profile)"
uv_install -q -e "$target" || fail "could not install $target"
.venv/bin/python - "$source" <<'PY' || fail "the installed packages do not import; the same command starts again from an empty .venv"
import platform, sys
import torch, yunque
build = f"CUDA {torch.version.cuda} build, GPU {'found' if torch.cuda.is_available() else 'not found'}" if torch.version.cuda else "no CUDA"
if torch.version.cuda is None and "+cpu" in torch.__version__:
    build = "CPU build"
print(f"setup: torch {torch.__version__} ({build}) from {sys.argv[1]}; yunque {yunque.__version__} on Python {platform.python_version()}")
PY
rm -f .venv/.yunque-*
: > "$(stamp_of "$profile")"
rm -f .venv.incomplete
say "done in ${SECONDS} s"
