"""Draw layouts.svg: which of 4 ranks holds which element of an 8 x 8 tensor. python docs/pictures/layouts.py"""

from __future__ import annotations

from pathlib import Path

from hpcdist.layout import Block, Boxes, Layout, Split

SHAPE, RANKS = (8, 8), 4
SHOWN: dict[str, Layout] = {
    "Split(0)": Split(0),
    "Split(1)": Split(1),
    "Split(0, counts=(1, 4, 0, 3))": Split(0, counts=(1, 4, 0, 3)),
    "Block((2, 2), (0, 1))": Block((2, 2), (0, 1)),
    "Block((2, 2), (0, None))": Block((2, 2), (0, None)),
    "Boxes: any box per rank": Boxes((((0, 0), (8, 3)), ((0, 3), (2, 5)), ((2, 3), (6, 2)), ((2, 5), (6, 3)))),
}
CELL, ACROSS, WIDTH = 14, 200, 400
STYLE = """
text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}.g{fill:#f3f5f8}path{stroke:#f3f5f8}
.r0{fill:#3574c4}.r1{fill:#d9822b}.r2{fill:#3a9d6b}.r3{fill:#a157b5}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.g{fill:#1c2129}path{stroke:#1c2129}
.r0{fill:#6ea8f0}.r1{fill:#f0a95c}.r2{fill:#63c796}.r3{fill:#cf95e0}}
"""


def main() -> None:
    parts = []
    for i, (name, layout) in enumerate(SHOWN.items()):
        left, top = 16 + ACROSS * (i % 2), 30 + 164 * (i // 2)
        parts.append(f'<text x="{left}" y="{top - 8}"' + fitted(name) + f">{name}</text>")
        owners: dict[tuple[int, int], list[int]] = {}
        for rank, box in enumerate(layout.boxes(SHAPE, RANKS)):
            for row in range(box.offset[0], box.offset[0] + box.shape[0]):
                for column in range(box.offset[1], box.offset[1] + box.shape[1]):
                    owners.setdefault((row, column), []).append(rank)
        cells: dict[int, str] = {}
        for (row, column), ranks in owners.items():
            width = CELL / len(ranks)
            for j, rank in enumerate(ranks):
                at = f"M{left + CELL * column + width * j:g} {top + CELL * row}"
                cells[rank] = cells.get(rank, "") + f"{at}h{width:g}v{CELL}h-{width:g}z"
        parts += [f'<path class="r{rank}" d="{path}"/>' for rank, path in cells.items()]
    height = 30 + 164 * ((len(SHOWN) + 1) // 2)
    for rank in range(RANKS):
        x = 16 + 96 * rank
        parts.append(f'<rect class="r{rank}" x="{x}" y="{height - 14}" width="14" height="14"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 3}">rank {rank}</text>')
    height += 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">'
    ground = f'<rect class="g" width="{WIDTH}" height="{height}" rx="8"/>'
    text = "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>", ""])
    Path(__file__).with_suffix(".svg").write_text(text)


def fitted(name: str) -> str:
    """Return the attributes of a text that would be wider than its picture."""
    return ' textLength="172" lengthAdjust="spacingAndGlyphs"' if len(name) > 24 else ""


if __name__ == "__main__":
    main()
