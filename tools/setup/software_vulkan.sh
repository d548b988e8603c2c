#!/usr/bin/env bash
# Puts a software Vulkan device (Mesa's llvmpipe) on a Debian-like machine: the loader, Mesa >= 24 and vulkaninfo.
#
# This is the only part of the project that changes the system. It does nothing when the device already answers.
# Mesa before 24 lacks the f16 features that ONNX Runtime's WebGPU provider asks for, so on a release whose own Mesa is
# older (Debian 12) that one package, with what it depends on, comes from the release's backports suite. The mirror is the one
# that apt already uses. Backports never win by themselves (their priority is 100), so no pinning file is needed.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

MESA_WANTED=24
PACKAGES=(libvulkan1 vulkan-tools mesa-vulkan-drivers)

say() { printf 'software-vulkan: %s\n' "$*"; }
die() { printf 'software-vulkan: error: %s\n' "$*" >&2; exit 1; }

# What vulkaninfo says of llvmpipe, e.g. "Mesa 25.0.7-2~bpo12+1 (LLVM 19.1.7)"; empty when it does not show.
# vulkaninfo exits non-zero on some machines without a display although the list is complete: only the text counts.
llvmpipe() {
    local runtime_dir=${XDG_RUNTIME_DIR:-}
    [[ -n $runtime_dir ]] || runtime_dir=$(mktemp -d)
    { XDG_RUNTIME_DIR=$runtime_dir vulkaninfo --summary 2>/dev/null || true; } |
        awk -F ' = ' '$1 ~ /deviceName/ { soft = $2 ~ /^llvmpipe/ } soft && $1 ~ /driverInfo/ { print $2; exit }'
    [[ -n ${XDG_RUNTIME_DIR:-} ]] || rm -rf "$runtime_dir"
}

# The leading number of "Mesa 25.0.7-2 …", of "25.0.7-2" and of "1:25.0.7"; 0 when there is none.
major() { sed -nE 's/^(Mesa )?([0-9]+:)?([0-9]+)\..*/\3/p;t;s/.*/0/p' <<<"${1:-}"; }

# apt as root, waiting for another apt to finish rather than failing beside it.
apt_root() { "${ROOT[@]}" apt-get -qq -o DPkg::Lock::Timeout=300 "$@" </dev/null; }

candidate() { apt-cache policy mesa-vulkan-drivers | awk '$1 == "Candidate:" { print $2 }'; }

# Newest version that a suite offers, whatever its priority; empty when the suite has none.
offered_by() { apt-cache madison mesa-vulkan-drivers | awk -F ' *[|] *' -v s="$1" '$3 ~ " " s "/" { print $2; exit }'; }

ready() {
    command -v vulkaninfo >/dev/null || return 1
    found=$(llvmpipe)
    (( $(major "$found") >= MESA_WANTED ))
}

add_backports() {
    local suite=$1 uri keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    uri=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v c="$VERSION_CODENAME" '$1 == c && $2 == "main" { print $3; exit }')
    [[ -n $uri ]] || die "apt has no source for '$VERSION_CODENAME main', so the mirror of '$suite' is unknown; add that suite and run this again"
    say "adding the suite '$suite' from apt's present mirror"
    {
        printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$uri" "$suite"
        [[ ! -e $keyring ]] || printf 'Signed-By: %s\n' "$keyring"
    } | "${ROOT[@]}" tee /etc/apt/sources.list.d/viaduct-backports.sources >/dev/null
    apt_root update
}

if ready; then
    say "llvmpipe answers, $found: nothing to do"
    exit 0
fi

command -v apt-get >/dev/null ||
    die "this machine has no apt; install the Vulkan loader, vulkaninfo and Mesa >= $MESA_WANTED with its llvmpipe driver by hand"
ROOT=()
if (( EUID != 0 )); then
    command -v sudo >/dev/null || die 'packages must be installed: run this as root'
    ROOT=(sudo --preserve-env=DEBIAN_FRONTEND,LC_ALL)
fi
# shellcheck source=/dev/null
. /etc/os-release

apt_root update || say 'warning: apt could not refresh every list; going on with those it has'
wanted=("${PACKAGES[@]}")
if (( $(major "$(candidate)") < MESA_WANTED )); then
    suite=${VERSION_CODENAME:?}-backports
    [[ -n $(offered_by "$suite") || ${ID:-} != debian ]] || add_backports "$suite"
    (( $(major "$(offered_by "$suite")") >= MESA_WANTED )) ||
        die "neither ${PRETTY_NAME:-this release} nor its backports offer Mesa >= $MESA_WANTED"
    wanted=("${PACKAGES[@]/%mesa-vulkan-drivers/mesa-vulkan-drivers/$suite}")
fi
say "installing ${wanted[*]}"
apt_root install -y --no-install-recommends "${wanted[@]}"

ready || die "packages are installed, but vulkaninfo shows ${found:-no llvmpipe}; wanted Mesa >= $MESA_WANTED"
say "llvmpipe answers, $found"
