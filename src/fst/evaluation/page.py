"""A page of text, tables and figures: one self-contained HTML file, and the same in Markdown.

The HTML carries its images inside itself and asks nothing of a network; the Markdown points to
the image files beside it. All text is escaped. A folder with other files in it is refused; one that
holds a page lists its pictures in a third file, so that a new page replaces the old one whole.
"""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from matplotlib.figure import Figure
from matplotlib.text import Text

from fst.data.files import DataError, writing
from fst.evaluation.figures import Picture
from fst.evaluation.tables import Table
from fst.io import parse_json, write_atomically
from fst.terminal import markdown

HTML, MARKDOWN, IMAGES, WRITTEN = "index.html", "report.md", "figures", "report.json"
WRITER = "fst report"
DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and pictures, in that order."""

    heading: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Page:
    title: str
    paragraphs: tuple[str, ...]
    sections: tuple[Section, ...]


def write_page(page: Page, folder: Path) -> Path:
    """Write the page into a folder, which is made if missing; returns the HTML file.

    The folder must be empty or hold a page, which is replaced.
    """
    names = [picture.name for section in page.sections for picture in section.pictures]
    if len(set(names)) < len(names):
        raise ValueError(f"pictures must have different names, got {', '.join(sorted(names))}")
    images = {
        picture.name: png(picture.figure)
        for section in page.sections
        for picture in section.pictures
    }
    with writing(folder):
        for name in pictures_written(folder) - images.keys():
            (folder / IMAGES / f"{name}.png").unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        # First of all files: a page that was interrupted can be written again.
        listed = {"written_by": WRITER, "pictures": sorted(images)}
        write_atomically(folder / WRITTEN, json.dumps(listed).encode())
        (folder / IMAGES).mkdir(exist_ok=True)
        for name, data in images.items():
            write_atomically(folder / IMAGES / f"{name}.png", data)
        write_atomically(folder / MARKDOWN, markdown_page(page).encode())
        write_atomically(folder / HTML, html_page(page, images).encode())
    return folder / HTML


def pictures_written(folder: Path) -> set[str]:
    """The names of the pictures of the page in a folder; raises if it holds something else."""
    # A page that was killed at its very start has left no more than a part of its list.
    if not folder.exists() or all(path.name == f"{WRITTEN}.part" for path in folder.iterdir()):
        return set()
    try:
        listed = parse_json((folder / WRITTEN).read_bytes())
        if listed["written_by"] != WRITER:
            raise ValueError
        # Whatever the list says, nothing outside the folder of pictures is removed.
        return {name for name in listed["pictures"] if Path(name).name == name}
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{folder} already holds files that no report wrote ({WRITTEN} of a report is not "
            "among them), and nothing is overwritten; choose another folder"
        ) from None


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Names may hold dollar signs, which are no mathematics; powers of ten at ticks are.
    ticks = [
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label in axis.get_ticklabels(which="both")
    ]
    for text in figure.findobj(Text):
        text.set_parse_math(text in ticks)
    # Without the version of the library, the same figure is the same file.
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def markdown_page(page: Page) -> str:
    parts = [f"# {markdown(page.title)}\n", *(f"{markdown(text)}\n" for text in page.paragraphs)]
    for section in page.sections:
        parts.append(f"## {markdown(section.heading)}\n")
        parts += [f"{markdown(text)}\n" for text in section.paragraphs]
        for table in section.tables:
            parts.append(f"**{markdown(table.title)}**\n\n{table.markdown()}")
        for picture in section.pictures:
            caption = markdown(picture.caption)
            parts.append(f"![{caption}]({IMAGES}/{picture.name}.png)\n\n*{caption}*\n")
    return "\n".join(parts)


def html_page(page: Page, images: dict[str, bytes]) -> str:
    encoded = {name: base64.b64encode(data).decode() for name, data in images.items()}
    return _PAGE.render(page=page, images=encoded)


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
_PAGE = _ENVIRONMENT.from_string("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 64rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.75rem; padding-top: 0.75rem;
     border-top: 1px solid #d9d9d9; }
p { max-width: 46rem; margin: 0.5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem;
        font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.4rem; }
th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; vertical-align: top; }
th { border-bottom: 1.5px solid #1a1a1a; font-weight: 600; }
td { border-bottom: 1px solid #ececec; }
.number { text-align: right; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; display: block; }
figcaption { color: #444; font-size: 0.9rem; margin-top: 0.4rem; max-width: 46rem; }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
{% for text in page.paragraphs %}
<p>{{ text }}</p>
{% endfor %}
{% for section in page.sections %}
<section>
<h2>{{ section.heading }}</h2>
{% for text in section.paragraphs %}
<p>{{ text }}</p>
{% endfor %}
{% for table in section.tables %}
<div class="wide">{{ table.html() }}</div>
{% endfor %}
{% for picture in section.pictures %}
<figure>
<img alt="{{ picture.caption }}"
     style="width:{{ (96 * picture.figure.get_figwidth()) | round | int }}px"
     src="data:image/png;base64,{{ images[picture.name] }}">
<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endfor %}
</section>
{% endfor %}
</body>
</html>
""")
