"""What torch does around a call: versions of tensors, tracing, compilation, transforms, default devices and dtypes."""

from types import FunctionType

import pytest
import torch
from collective import assert_on_all_ranks, refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import hpcdist as hd

pytestmark = pytest.mark.mpi

# --- what is written into a caller's tensor --------------------------------------------------------------------------


def _into(world, folder):
    """What writes into a caller's tensor: (the call with that as its out, the shape of the result on this rank)."""
    x, rows, rank = torch.ones(2), hd.Split(0), world.rank
    all_ = (2 * world.world_size,)
    plan = hd.plan(hd.redistribute, x, rows, hd.Replicate())
    hd.staging.save(folder / "x.h5", {"x": x})
    root = world.world_size - 1
    return {
        "concat": (lambda out: hd.concat(x, out=out), all_),
        "concat, hdf5": (lambda out: hd.concat(x, out=out, route="hdf5"), all_),
        "asynchronous concat": (lambda out: hd.concat(x, out=out, async_op=True).wait(60), all_),
        "gather": (lambda out: hd.gather(x, root=root, out=out if rank == root else None), all_),
        "split": (lambda out: hd.split(torch.ones(all_) if rank == root else None, 0, root, out=out), (2,)),
        "redistribute": (lambda out: hd.redistribute(x, rows, hd.Replicate(), out=out), all_),
        "all_reduce": (lambda out: hd.all_reduce(torch.ones(3), "max", out=out), (3,)),
        "reduce_scatter": (lambda out: hd.reduce_scatter(torch.ones(all_), op="prod", out=out), (2,)),
        "plan": (lambda out: plan(x, out), all_),
        "asynchronous plan": (lambda out: plan(x, out, async_op=True).wait(60), all_),
        "staging.load": (lambda out: hd.staging.load(folder / "x.h5", "x", out=out, dim=None), all_),
        "staging.open": (lambda out: hd.staging.open(folder / "x.h5").read("x", out=out), all_),
    }


def test_what_autograd_knows_of_out(findings, world, folder):
    """As after an in-place operation of torch's, though MPI, gloo or the reading of a file has written: a backward pass
    that needs the old values fails. One that requires a gradient is refused as torch.cat(out=) refuses it, and
    untouched; it is written where no graph is kept."""
    last = world.rank == world.world_size - 1
    for name, (call, shape) in _into(world, folder).items():
        has_out = name != "gather" or last
        out, weight = torch.zeros(shape), torch.ones(shape, requires_grad=True)
        y, version = (weight * out).sum(), out._version
        call(out)
        if has_out:
            findings.same(out, torch.ones(shape), name)
            findings.check(out._version > version, f"{name}: autograd was not told")
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
        leaf = torch.zeros(shape, requires_grad=True)
        with pytest.raises(
            ValueError if name == "staging.open" else hd.RankError, match=r"requires a gradient|gradient is needed"
        ):
            call(leaf)
        findings.check(leaf._version == 0 or "asynchronous" in name, f"{name}: refused, but counted as written")
        with torch.no_grad():
            call(leaf)
        findings.check(not has_out or leaf.eq(1).all(), f"{name}: {leaf}")
        findings.check(leaf.requires_grad and leaf.is_leaf, name)


# --- the default device and dtype ------------------------------------------------------------------------------------


class _Elsewhere:
    """A default device on which nothing is kept, and another default dtype, as torch.set_default_device sets them."""

    def __enter__(self):
        self._device = torch.device("meta")
        self._device.__enter__()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        self._device.__exit__(*error)


def _host(*shape, start=0):
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32, device="cpu").view(shape)


@pytest.mark.parametrize("route", ["mpi", "gloo", "hdf5"])
def test_verbs_do_not_depend_on_the_default_device_and_dtype(findings, rank, size, route):
    x, large, whole = _host(3, 2, start=6 * rank), _host(3, 70_000), _host(3 * size, 2)
    by_column = torch.cat([_host(3, 2, start=6 * r) for r in range(size)], 1)
    with _Elsewhere():
        out = torch.empty(3, 2 * size, dtype=torch.float32, device="cpu").t().contiguous().t()
        findings.same(hd.concat(x, 1, route=route, out=out), by_column, "concat, dim 1, out")
        findings.same(hd.split(hd.gather(x, 1, route=route), 1, route=route), x, "gather, split")
        columns = hd.redistribute(x, hd.Split(0), hd.Split(1), route=route)
        findings.same(hd.redistribute(columns, hd.Split(1), hd.Split(0), route=route), x, "redistribute")
        total = sum(_host(3, 2, start=6 * r) for r in range(size))
        findings.same(hd.all_reduce(x, route=route), total, "all_reduce")
        findings.same(hd.reduce_scatter(x, 1, route=route), hd.split(total, 1, root=None), "reduce_scatter")
        parts, counts = hd.all_to_all(whole, [3] * size, route=route)
        findings.same(parts, _host(3, 2, start=6 * rank).repeat(size, 1), "all_to_all")
        findings.check(counts == [3] * size, counts)
        tree = hd.concat({"x": x, "large": [large], "name": b"abc", "n": 2**70, "empty": b""}, route=route)
        findings.same(tree["x"], whole, "a structure")
        findings.same(tree["large"][-1], large, "a large tensor in a structure")
        findings.check(tree["name"] == [b"abc"] * size and tree["empty"] == [b""] * size, "bytes")
        sent = hd.isend([x, large, b"z"], (rank + 1) % size)
        got = hd.recv((rank - 1) % size)
        sent.wait(60)
        findings.same(got[0], _host(3, 2, start=6 * ((rank - 1) % size)), "recv")
        findings.same(got[1], large, "recv, large")
        leaf = x.clone().requires_grad_(rank == size - 1)
        hd.concat(leaf, 1, route=route).sum().backward()
        findings.check(rank < size - 1 or torch.equal(leaf.grad, torch.full_like(x, size)), "a gradient")


# --- tracers and transforms, which see the operations of torch alone -------------------------------------------------


def _within(x):
    """What records, or transforms, a function of `x` instead of running it."""

    def fake(f):
        with FakeTensorMode():
            return f(x)

    return {
        "make_fx": lambda f: make_fx(lambda x: f(x))(x),
        "make_fx, symbolic": lambda f: make_fx(lambda x: f(x), tracing_mode="symbolic")(x),
        "make_fx, before dispatch": lambda f: make_fx(lambda x: f(x), pre_dispatch=True)(x),
        "torch.fx": lambda f: torch.fx.symbolic_trace(lambda x: f(x)),
        "jit": lambda f: torch.jit.trace(lambda x: f(x), x),
        "export": lambda f: torch.export.export(_Module(f), (x,), strict=False),
        "fake": fake,
        "functionalize": lambda f: torch.func.functionalize(f)(x),
        "vmap": lambda f: torch.vmap(f)(x),
        "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(x),
        "jvp": lambda f: torch.func.jvp(f, (x,), (x,)),
    }


class _Module(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_traced_is_refused_on_all_ranks(findings, rank, size, folder):
    """Else the graph would return memory that nobody has written, or the values of the first run for ever."""
    x, path = torch.ones(4, 2), folder / "x.h5"
    plan = hd.plan(hd.redistribute, x, hd.Split(0), hd.Replicate())
    hd.staging.save(path, x)
    calls = {
        "concat": (hd.RankError, hd.concat),
        "in the background": (hd.RankError, lambda x: hd.concat(x, async_op=True).wait(60)),
        "a structure": (hd.RankError, lambda x: hd.gather({"x": x}, allow_pickle=True)),
        "no tensor in it": (hd.RankError, lambda x: hd.concat({"x": 1})),
        "split": (hd.RankError, lambda x: hd.split(x if rank == 0 else None)),
        "split of what all hold": (ValueError, lambda x: hd.split(x, root=None)),
        "redistribute": (hd.RankError, lambda x: hd.redistribute(x, hd.Split(0), hd.Split(1))),
        "all_reduce": (hd.RankError, hd.all_reduce),
        "all_to_all": (hd.RankError, lambda x: hd.all_to_all(x)),
        "plan": (hd.HpcdistError, plan),
        "isend": (hd.HpcdistError, lambda x: hd.isend(x, (rank + 1) % size)),
        "recv": (hd.HpcdistError, lambda x: hd.recv((rank + 1) % size)),
        "save": (hd.RankError, lambda x: hd.staging.save(folder / "y.h5", x)),
        "load": (hd.RankError, lambda x: hd.staging.load(path)),
        "open": (ValueError, lambda x: hd.staging.open(path).read("data")),
    }
    for mode, within in _within(x).items():
        for name, (kind, call) in calls.items():
            if mode not in ("make_fx", "vmap") and name not in ("concat", "recv"):
                continue
            try:
                got = within(call)
            except Exception as error:
                got = error
            right = isinstance(got, kind) and "cannot be traced or transformed: call it outside of" in str(got)
            findings.check(right, f"{mode}, {name}: {got!r}")
    traced = _within(x)["make_fx"] if rank == size - 1 else lambda f: f(x)
    refused("", traced, hd.concat, ranks=[size - 1])
    with FlopCounterMode(display=False):  # which looks on while things happen
        findings.same(hd.concat(x), torch.ones(4 * size, 2), "a mode that lets things happen")


def test_a_tangent_of_forward_mode_is_refused(world):
    """It would be lost. Where there is none, the mode does not matter."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for value in (dual, {"x": [dual]}):
            with pytest.raises(hd.RankError, match=r"has a forward-mode tangent, which would be lost"):
                hd.concat(value)
        with pytest.raises(TypeError, match=r"x\['x'\] has a forward-mode tangent, which would be lost"):
            hd.isend({"x": dual}, 0)
        assert hd.concat(torch.ones(2)).numel() == 2 * world.world_size


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_gradients_is_an_error(rank, size):
    """Of jacobian(vectorize=True), grad(is_grads_batched=True) and torch.vmap of grad; of one rank alone, on all."""
    x = torch.arange(6.0).view(3, 2) + rank
    leaf = x.clone().requires_grad_()
    whole = hd.concat(2 * leaf)
    rows, last = torch.eye(whole.numel()).view(-1, *whole.shape), rank == size - 1

    def grad(row, **options):
        return torch.autograd.grad(whole, leaf, row, retain_graph=True, **options)[0]

    for batched in (lambda: grad(rows, is_grads_batched=True), lambda: torch.vmap(grad)(rows)):
        refused("[HD219]", batched if last else lambda: grad(rows[0]))
    one_by_one = torch.autograd.functional.jacobian(lambda x: hd.concat(2 * x), x)
    assert_on_all_ranks(one_by_one.sum().item() == 2 * x.numel() * size, one_by_one)


def test_a_gradient_of_a_gradient_is_an_error(world, size):
    """However it is asked for: torch would give zeros to some of these. One rank alone may ask for it."""
    x = torch.ones(2, requires_grad=True)
    last = world.rank == size - 1

    def squares(x):
        return (hd.concat(x) ** 2).sum()

    for what in (
        lambda: torch.autograd.grad(squares(x), x, create_graph=True),
        lambda: squares(x).backward(create_graph=last),
        lambda: torch.autograd.functional.hessian(squares, x),
        lambda: torch.autograd.functional.hvp(squares, x, torch.ones(2)),
        lambda: torch.autograd.functional.vhp(squares, x, torch.ones(2)),
    ):
        refused("cannot be differentiated twice", what)
    (gradient,) = torch.autograd.grad(hd.concat(x).sum(), x, create_graph=True)  # of what is linear it is a constant
    assert_on_all_ranks(gradient.tolist() == [size] * 2 and not gradient.requires_grad, "grad")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex32], ids=str)
def test_gradients_of_dtypes_that_torch_cannot_add(findings, world, dtype):
    wide = torch.complex64 if dtype.is_complex else torch.float32
    for verb in (hd.concat, lambda x: hd.redistribute(x, hd.Split(0), hd.Replicate())):
        x = torch.ones(3).to(dtype).requires_grad_()
        torch.view_as_real(verb(x).to(torch.complex64)).sum().backward()
        expected = torch.full((3,), float(world.world_size)).to(dtype).to(wide)
        findings.same(x.grad.to(wide).real, expected.real, f"{x.grad}")


# --- torch.compile ---------------------------------------------------------------------------------------------------


def test_no_public_function_is_compiled():
    public = [getattr(hd, name) for name in hd.__all__] + [getattr(hd.staging, name) for name in hd.staging.__all__]
    functions = [item for item in public if isinstance(item, FunctionType)]
    functions += [hd.Plan.__call__, hd.Handle.wait, hd.Handle.done, hd.World.finalize, hd.World.__exit__]
    functions += [hd.staging.ReadFile.read, hd.staging.WriteFile.write]
    assert len(functions) > 20
    assert [f.__qualname__ for f in functions if not getattr(f, "_torchdynamo_disable", False)] == []


@pytest.mark.filterwarnings("ignore")
def test_within_a_compiled_function(findings, rank, size, folder):
    """Each call breaks the graph, and runs as it is: nothing of hpcdist is compiled."""
    from torch._dynamo.exc import Unsupported  # which takes seconds

    after, before, path = (rank + 1) % size, (rank - 1) % size, folder / "x.h5"
    x = torch.arange(3.0) + 3 * rank
    out = torch.empty(3 * size)

    def through_a_file(x):
        hd.staging.save(path, x)
        with hd.staging.open(path) as file:
            return file.read("data") + 0 * hd.staging.load(path).sum()

    def passed_on(x):
        handle = hd.isend({"x": x}, after)
        got = hd.recv(before)["x"]
        handle.wait(60)
        sent, coming = hd.isend(got, before), hd.irecv(after)
        sent.wait(60)
        return coming.wait(60)

    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module.forward

    whole = torch.arange(3.0 * size)
    calls = {
        "concat": (hd.concat, whole),
        "in the background, out": (lambda x: hd.concat(x, out=out, async_op=True).wait(60), whole),
        "a structure": (lambda x: hd.concat({"x": x, "n": 1})["x"], whole),
        "send, recv": (passed_on, x),
        "staging": (through_a_file, whole),
        "init": (lambda x: x + 0 * hd.init().rank + 0 * hd.current().world_size, x),
    }
    for name, (call, expected) in calls.items():
        compiled = torch.compile(lambda x, call=call: call(x * 2) + 1, backend=backend)
        for turn in range(2):
            findings.same(compiled(x + turn), 2 * (expected + turn) + 1, f"{name}, turn {turn}")
    leaf = x.clone().requires_grad_()
    torch.compile(lambda x: (hd.concat(x * 2) ** 2).sum().backward(), backend=backend)(leaf)  # backward, too
    findings.same(leaf.grad, 8 * size * x, "a gradient")
    package = hd.__file__.removesuffix("__init__.py")
    own = [node.stack_trace for graph in graphs for node in graph.nodes if package in (node.stack_trace or "")]
    findings.check(graphs and not own, f"compiled: {own}")
    with pytest.raises(Unsupported, match="hpcdist moves data between processes"):
        torch.compile(lambda x: hd.concat(x * 2) + 1, backend="eager", fullgraph=True)(x)
    findings.same(hd.concat(x), whole, "after all that")
    torch.compiler.reset()  # else torch 2.14 and 2.15 drop code when the program ends, and print errors of their own
