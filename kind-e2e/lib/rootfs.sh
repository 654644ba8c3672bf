# Root file systems: one program, the shared libraries that it loads, and the few files that libc asks for.
# Sourced after common.sh.

ROOTFS=$CACHE/rootfs

# Paths of the loader and of every shared library that a program needs; none for a static one.
libraries_of() {
  ldd "$1" 2>/dev/null | awk '$2 == "=>" { print $3 } $1 ~ /^\// { print $1 }' | sort -u
}

hash_of() { sha256sum "$@" | awk '{ print $1 }' | sha256sum | cut -d' ' -f1; }

# base_files ROOT: users, name service order, a writable /tmp.
base_files() {
  mkdir -p "$1"/{etc,tmp,run,proc,sys,dev,usr/bin,usr/lib}
  chmod 1777 "$1/tmp"
  printf '%s\n' 'root:x:0:0:root:/:/sbin/nologin' 'user:x:1000:1000:user:/tmp:/bin/sh' \
    'nonroot:x:65532:65532:nonroot:/tmp:/sbin/nologin' >"$1/etc/passwd"
  printf '%s\n' 'root:x:0:' 'user:x:1000:' 'nonroot:x:65532:' >"$1/etc/group"
  printf '%s\n' 'passwd: files' 'group: files' 'hosts: files dns' >"$1/etc/nsswitch.conf"
}

minimal_rootfs() { # minimal_rootfs ROOT PROGRAM
  local root=$1 program=$2 library
  rm -rf "$root"
  base_files "$root"
  # Not to be read: into a process of such a program the kernel lets nobody else of its user look, from its start.
  install -m 0711 "$program" "$root/usr/bin/"
  for library in $(libraries_of "$program"); do
    mkdir -p "$root$(dirname "$library")"
    install -m 0755 "$(readlink -f "$library")" "$root$library"
  done
}
