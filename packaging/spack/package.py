# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcdist(PythonPackage):
    """Runs PyTorch programs as MPI jobs; gathers, concatenates, splits and
    redistributes ragged tensors; writes checkpoints as one HDF5 file."""

    # Not on PyPI yet: put the source distribution into a mirror, or build from a clone
    # with spack develop --path CLONE py-hpcdist@@VERSION@
    pypi = "hpcdist/hpcdist-@VERSION@.tar.gz"

    license("MIT")

    version("@VERSION@", sha256="@SHA256@")

    variant("mpiio", default=True, description="Build h5py with parallel HDF5")

    depends_on("py-setuptools@61:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-torch@2.11:+distributed")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@1.24:")
        depends_on("py-h5py@3.9:")
        depends_on("py-h5py+mpi", when="+mpiio")
        depends_on("py-tqdm@4.60:")
        depends_on("py-xxhash@3.2:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-psutil@6:")
        depends_on("py-safetensors@0.8:")
