#!/bin/bash
# Run a command with its temporary files, and HPCDIST_BENCH_DISK, on another file system. Needs root and 3 GiB (SPACE).
#   disk.sh KIND STATE COMMAND ...        disk.sh xfs aged mpirun -n 2 python benchmarks/staging.py --sizes 128M
# KIND:  ext4, xfs: in a file in the folder TMPDIR (/var/tmp), by a loop device without a cache of its own; tmpfs.
# STATE: fresh; or aged: filled with files of 4 to 800 KiB of which every second one is removed, so that free space is in
#        pieces, and memory that the kernel has handed out before (a new virtual machine's is slow to begin with).
set -euo pipefail
kind=$1 state=$2
shift 2
dir=$(mktemp -d -p "${TMPDIR:-/var/tmp}") loop=
trap 'umount -l "$dir/disk" || true; [ -z "$loop" ] || losetup -d "$loop"; rm -rf --one-file-system "$dir"' EXIT
mkdir "$dir/disk"
if [ "$kind" = tmpfs ]; then
    mount -t tmpfs -o "size=${SPACE:-3G}" tmpfs "$dir/disk"
else
    fallocate -l "${SPACE:-3G}" "$dir/image"
    loop=$(losetup -f --show --direct-io=on "$dir/image")
    "mkfs.$kind" -q "$loop"
    mount "$loop" "$dir/disk"
fi
if [ "$state" = aged ]; then
    python3 - "$dir/disk" <<'END'
import os, random, shutil, sys

root, content, pick, count = sys.argv[1], os.urandom(800 * 2**10), random.Random(1), 0
os.mkdir(f"{root}/old")
while shutil.disk_usage(root).free > 200 * 2**20:
    for count in range(count, count + 200):
        with open(f"{root}/old/{count}", "wb") as file:
            file.write(content[: 4096 * pick.choice((1, 3, 16, 64, 200))])
    count += 1
os.sync()
for i in range(0, count, 2):
    os.unlink(f"{root}/old/{i}")
os.sync()
with open(f"{root}/memory", "wb") as file:  # a hole: reading it takes memory, and none of the disk
    file.truncate(2**33 if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 2**34 else 2**31)
with open(f"{root}/memory", "rb", buffering=0) as file:
    while file.read(2**24):
        pass
os.unlink(f"{root}/memory")
END
fi
export TMPDIR=$dir/disk
"$@"
