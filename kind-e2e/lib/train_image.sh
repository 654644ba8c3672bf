# The training image: Debian's python3, NumPy and torch, upstream's vortex-data and PyArrow, and our wheel.
# Three layers, by how often they change. Sourced by `images`, after python.sh.

# Packages whose files go in; the shared libraries that those need are found with ldd, which is a third of what
# their Debian dependencies would bring.
IMAGE_PACKAGES=(python3 python3-minimal python3.11 python3.11-minimal libpython3.11-stdlib libpython3.11-minimal
  python3-numpy python3-torch python3-typing-extensions python3-yaml libc6 dash coreutils findutils)
PYTHON_LOCAL=usr/local/lib/python3.11/dist-packages

package_files() {
  local file
  dpkg-query -L "${IMAGE_PACKAGES[@]}" | grep -E '^/(usr|lib|bin)/' |
    grep -vE '^/usr/share/|^/usr/include/|/test/|/gconv/|/__pycache__/|^/usr/lib/python3/dist-packages/torch/include/' |
    while read -r file; do if [ -L "$file" ] || [ -f "$file" ]; then echo "${file#/}"; fi; done
}

link_target() { # one step of a link, as an absolute path
  local target
  target=$(readlink "$1")
  case $target in
    /*) echo "$target" ;;
    *) realpath -sm "$(dirname "$1")/$target" ;;
  esac
}

install_as() { # install_as ROOT PATH: the file that PATH leads to, under exactly this path
  if [ -f "$2" ] && [ ! -e "$1$2" ]; then
    mkdir -p "$1$(dirname "$2")"
    install -m 0755 "$(readlink -f "$2")" "$1$2"
  fi
}

debian_layer() { # debian_layer ROOT
  local root=$1 list library link
  rm -rf "$root"
  base_files "$root"
  mkdir -p "$root"/usr/{sbin,lib64}
  ln -s usr/bin "$root/bin"
  ln -s usr/sbin "$root/sbin"
  ln -s usr/lib "$root/lib"
  ln -s usr/lib64 "$root/lib64"
  list=$(mktemp)
  package_files | sort -u >"$list"
  tar -C / -cf - -T "$list" | tar -C "$root" -xf - --no-same-owner
  ln -s dash "$root/usr/bin/sh" 2>/dev/null || true
  # Links into packages that are not listed: the name that the link gives becomes the file.
  while read -r library; do
    install_as "$root" "$library"
  done < <(while read -r link; do if [ -L "/$link" ]; then link_target "/$link"; fi; done <"$list")
  for library in $(sed 's|^|/|' "$list" | grep -E '\.so(\.|$)|/bin/' | xargs -r -n 64 ldd 2>/dev/null |
    awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// && !/:$/ { print $1 }' | sort -u); do
    install_as "$root" "$library"
  done
  rm -f "$list"
}

pip_layer() { # pip_layer ROOT: NumPy comes from Debian, because Debian's torch is built against it
  rm -rf "$1"
  mkdir -p "$1/$PYTHON_LOCAL"
  "$PYTHON" -m pip install -q --disable-pip-version-check --only-binary :all: --no-compile --target "$1/$PYTHON_LOCAL" \
    "pyarrow==$PYARROW" "vortex-data==$VORTEX_DATA" 'numpy<2'
  rm -rf "$1/$PYTHON_LOCAL"/{bin,numpy,numpy-*,numpy.libs} "$1/$PYTHON_LOCAL"/pyarrow/{include,tests,src}
}

own_layer() { # own_layer ROOT: our wheel, and the ring's C library under the name that its header gives
  rm -rf "$1"
  mkdir -p "$1/$PYTHON_LOCAL"
  python_wheel || return 1
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --no-compile --target "$1/$PYTHON_LOCAL" \
    "$CACHE"/wheel/lampyris-*.whl || return 1
  install -D -m 0755 "$CARGO_TARGET_DIR/debug/libring.so" "$1/usr/lib/x86_64-linux-gnu/liblampyris_ring.so"
}

train_image() {
  local root=$ROOTFS/train inputs
  python_tools
  apt_install "${IMAGE_PACKAGES[@]}"
  inputs=$({ echo "$PYARROW $VORTEX_DATA"; dpkg-query -W "${IMAGE_PACKAGES[@]}"; } | cat - "$KIND_E2E/lib/train_image.sh" "$KIND_E2E/lib/rootfs.sh" | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$root/base.inputs" 2>/dev/null)" != "$inputs" ]; then
    mkdir -p "$root"
    step "train: Debian layer" debian_layer "$root/base"
    step "train: PyPI layer" pip_layer "$root/pip"
    echo "$inputs" >"$root/base.inputs"
  fi
  step "train: wheel and ring library" own_layer "$root/own"
  inputs="$inputs $(cd "$root/own" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1) $REGISTRY $TAG"
  unchanged train "$inputs" && return
  archive "$REGISTRY/train:$TAG" "$IMAGES/train.tar" 1000:1000 /usr/bin/python3 "$root/base" "$root/pip" "$root/own"
  built train "$inputs"
}
