"""Join arrays from files to one result: in memory, on one rank or on all, or in one file."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from hpcdist import layout
from hpcdist.collectives.concat import concat
from hpcdist.collectives.gather import gather
from hpcdist.commands import inputs
from hpcdist.commands.compare import ROUNDS, compare, route_table
from hpcdist.commands.inputs import Inputs
from hpcdist.commands.steps import Command, Report, shortened, speed
from hpcdist.commands.streaming import Joined
from hpcdist.commands.verify import verify_tensors
from hpcdist.control import objects
from hpcdist.layout import Box
from hpcdist.routes.select import best
from hpcdist.runtime.cli import placed, plural, show_bytes, timed
from hpcdist.tensors.storage import copyable

__all__ = ["Join"]


class Join(Command):
    """Join the inputs, in memory or in one file."""

    verdict = ": {} the inputs read on one process"

    def check(self, data: Inputs) -> None:
        output = self.options.output
        if output is not None:
            step = lambda: self.check_output(data, output, data.nbytes())  # noqa: E731
            objects.broadcast(self.world.team.comm, "output", step, self.options.root)

    def move(self, data: Inputs) -> Report:
        return self._gather(data) if self.options.in_memory else self._stream(data)

    def _stream(self, data: Inputs) -> Report:
        """Copy from the inputs to the output, with no more than a window in memory. Collective."""
        options, writer = self.options, self.writer(data)
        assert options.output is not None
        report: Report = {"bytes_sent": 0 if options.all_write else self._sent(data)}
        with Joined(data, options.window // 2) as joined:
            if options.all_write:
                report["route"] = "every rank writes"
                report |= writer.write_together(joined.read, options.output, data.shape)
            else:
                report["route"] = options.route
                report |= writer.write_on_root(joined.read, options.output, data.shape, options.route, options.root)
        return report | self.verify(data, [(options.output, layout.whole(data.shape))])

    def _gather(self, data: Inputs) -> Report:
        """Gather the inputs in memory, and write the output if there is one. Collective."""
        world, options = self.world, self.options
        inputs.check_memory(world, data, options.everywhere, options.root)
        shard = data.shard(world)
        report: Report = {"bytes_sent": self._sent(data)}

        def move(x: Tensor, route: str, out: Tensor | None) -> Tensor | None:
            done: Tensor | None
            if options.everywhere:
                done = concat(x, data.dim, route=route, out=out)
            else:
                done = gather(x, data.dim, options.root, route=route, out=out)
            return done

        result: Tensor | None
        if options.compare:
            report["routes"], result = compare(world, shard, move, data.nbytes())
        else:
            x = placed(world, shard, options.route)
            report["seconds"], result = timed(world, lambda: move(x, options.route, None))
            report["route"] = best(world.team, x.is_cuda) if options.route == "auto" else options.route
        if options.output:
            self._save(data, result, options.output)
        if options.verify or data.of_stdlib:
            report |= verify_tensors(world, data, result, options.output, options.root)
        return report

    def _save(self, data: Inputs, result: Tensor | None, output: str) -> None:
        """Write the root's result. Collective."""

        def read(box: Box, out: Tensor) -> None:
            assert result is not None  # on the root, which alone writes
            copyable(out).copy_(copyable(result[box.slices()]))

        parts = [(output, layout.whole(data.shape))] if self.world.rank == self.options.root else []
        self.writer(data).write_alone(read, parts)

    def _sent(self, data: Inputs) -> int:
        """Return the bytes sent between ranks: nothing is padded, so it is the same on every route."""
        own = data.nbytes_by_rank()
        return sum(own) * (self.world.world_size - 1) if self.options.everywhere else sum(own) - own[self.options.root]

    def text(self, data: Inputs, report: Report) -> list[str]:
        result, window = f"result: shape {tuple(report['shape'])}", show_bytes(self.options.window)
        if self.options.all_write:
            lines = [
                f"ranks: {report['ranks']}, each reads and writes its share, {window} at a time",
                f"{result} in the file; nothing sent between ranks",
            ]
        else:
            counts = shortened(end - start for start, end in pairwise(data.bounds))
            where = "every rank" if self.options.everywhere else f"rank {self.options.root}"
            lines = [
                f"ranks: {report['ranks']} on {plural(report['nodes'], 'node')}; arrays a rank: {counts}",
                f"{result} on {where}; {report['bytes_sent']:,} bytes sent between ranks",
            ]
        if "pieces" in report:
            lines.append(f"resumed: {report['pieces_kept']} of {report['pieces']} pieces were there and are kept")
        if "routes" in report:
            lines += ["", route_table(report["routes"], report["bytes_sent"]), ""]
            return [*lines, f"time: median of {ROUNDS} rounds, the slowest rank; GB/s: bytes of the result per time"]
        how = report["route"] if self.options.all_write else f"route {report['route']}"
        return [*lines, speed(how, report["seconds"], report["bytes"])]
