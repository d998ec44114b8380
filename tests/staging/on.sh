#!/bin/bash
# Run a command under a launcher with a folder on another kind of file system, which HPCDIST_TEST_FOLDER names. Needs root.
#   on.sh KIND LAUNCHER ... -- COMMAND ...
# clients: two clients of one folder, in turn for even and odd ranks, each of which caches pages of its own and writes
#          whole ones back, as NFS clients may; needs mergerfs (FUSE).
# xfs, btrfs: in a file, by a loop device.     tmpfs: one of 16 MiB, to be filled.
set -euo pipefail
kind=$1
shift
if [ "$kind" = rank ]; then # one rank, in a mount namespace of its own
    rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-0}}} dir=$1
    mount --bind "$dir/client$((rank % 2))" "$dir/shared"
    shift
    exec "$@"
fi
dir=$(mktemp -d)
mounted=()
trap 'for path in "${mounted[@]}"; do umount -l "$path"; done; rm -rf --one-file-system "$dir"' EXIT
mkdir "$dir/shared"
as_rank=()
case $kind in
clients)
    mkdir "$dir"/{backing,client0,client1}
    options=cache.writeback=true,cache.files=full,cache.attr=3,cache.entry=3,inodecalc=devino-hash,minfreespace=0
    for client in 0 1; do
        mergerfs -o "$options" "$dir/backing" "$dir/client$client"
        mounted+=("$dir/client$client")
    done
    as_rank=(unshare -m bash "$0" rank "$dir")
    ;;
tmpfs) mount -t tmpfs -o size=16m tmpfs "$dir/shared" ;;
*)
    truncate -s 2G "$dir/image"
    "mkfs.$kind" -q "$dir/image"
    mount -o loop "$dir/image" "$dir/shared"
    ;;
esac
[ "$kind" = clients ] || mounted=("$dir/shared")
export HPCDIST_TEST_FOLDER=$dir/shared
launcher=()
while [ "$1" != -- ]; do
    launcher+=("$1")
    shift
done
shift
"${launcher[@]}" "${as_rank[@]}" "$@"
