#!/bin/bash
# Run a command under a launcher with two clients of one folder, in turn for even and odd ranks, each of which caches pages
# of its own and writes whole ones back, as NFS clients may. Needs root and mergerfs (FUSE).
#   two_clients.sh LAUNCHER ... -- COMMAND ...      HPCDIST_TEST_FOLDER names the folder for the command
set -euo pipefail
if [ "$1" = rank ]; then # one rank, in a mount namespace of its own
    rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-0}}} dir=$2
    mount --bind "$dir/client$((rank % 2))" "$dir/shared"
    shift 2
    exec "$@"
fi
dir=$(mktemp -d)
trap 'umount -l "$dir/client0" "$dir/client1"; rm -rf --one-file-system "$dir"' EXIT
mkdir "$dir"/{backing,client0,client1,shared}
options=cache.writeback=true,cache.files=full,cache.attr=3,cache.entry=3,inodecalc=devino-hash
for client in 0 1; do mergerfs -o "$options" "$dir/backing" "$dir/client$client"; done
export HPCDIST_TEST_FOLDER=$dir/shared
launcher=()
while [ "$1" != -- ]; do
    launcher+=("$1")
    shift
done
shift
"${launcher[@]}" unshare -m bash "$0" rank "$dir" "$@"
