"""What MkDocs is told before it builds: pages that are made, links, equations and snippets.

`tutorials/` become pages with pictures, the command line its reference; files of the repository's
root become pages too. `$…$` and `$$…$$` become MathML, which browsers draw by themselves. A line
`{{ source fst.layer.Read.forward }}` becomes the code of that name. Nothing on a built page may
come from another host: the build fails if something does.
"""

import contextlib
import hashlib
import importlib
import inspect
import io
import os
import posixpath
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from time import perf_counter
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import method_figures
import tutorial

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "tutorials"
REDUCED = os.environ.get("FST_DOCS_REDUCED") == "1"
"""Tutorials at the size of the tests, for whoever writes a page and wants to see it soon."""

# Files of the root that are pages, and their addresses in the site.
ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LOG.md": "log.md",
    "results/README.md": "result-folders.md",
}
SOURCE = re.compile(r"^\{\{ source ([\w.]+) \}\}$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)
OTHER_HOST = r'"(?:https?:)?//[^"]*"'
LOADED = re.compile(
    rf"<(?:script|img|iframe|source)[^>]+src={OTHER_HOST}"
    rf'|<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]*href={OTHER_HOST}'
)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made."""

    def add(address: str, **content: Any) -> None:
        files.append(File.generated(config, address, **content))

    for name, address in ROOT_PAGES.items():
        add(address, content=(ROOT / name).read_text())
    add("command-line.md", content=command_line())
    folders = {path.stem: made(path) for path in scripts()}
    for name, folder in folders.items():
        add(f"tutorials/{name}.md", content=(folder / "page.md").read_text())
        for picture in sorted(folder.glob("*.png")):
            add(f"tutorials/{picture.name}", abs_src_path=str(picture))
    add("gallery.md", content=gallery(folders))
    for name, picture in method_figures.draw(ROOT / "build" / "method").items():
        add(f"images/method/{name}", abs_src_path=str(picture))
    return files


def scripts() -> list[Path]:
    return sorted((ROOT / "tutorials").glob("*.py"))


def made(script: Path) -> Path:
    """The folder with a tutorial's page; it is run anew when it, the package or shipped weights
    have changed."""
    folder = CACHE / script.stem
    package = sorted((ROOT / "src" / "fst").rglob("*.py"))
    weights = sorted((ROOT / "src" / "fst" / "weights").glob("*/model.safetensors"))
    sources = [script, Path(tutorial.__file__), *package, *weights]
    digest = hashlib.sha256(str(REDUCED).encode())
    for path in sources:
        digest.update(path.read_bytes())
    stamp = folder / "stamp"
    if not stamp.is_file() or stamp.read_text() != digest.hexdigest():
        print(f"running {script.relative_to(ROOT)} …", flush=True)
        start = perf_counter()
        command = [sys.executable, str(Path(tutorial.__file__)), str(script), str(folder)]
        if subprocess.run([*command, "--reduced"] if REDUCED else command).returncode:
            raise PluginError(f"{script.name} failed")
        print(f"  {perf_counter() - start:.0f} s", flush=True)
        stamp.write_text(digest.hexdigest())
    return folder


def gallery(folders: dict[str, Path]) -> str:
    """A card for each tutorial in the order of the navigation, those of the gallery first."""
    nav = (ROOT / "mkdocs.yml").read_text()
    order = re.findall(r"tutorials/(\w+)\.md", nav[nav.index("- Gallery:") :] + nav)
    cards = []
    for name in dict.fromkeys(order):
        pictures = sorted(folders[name].glob("*.png")) if name in folders else []
        if pictures:
            heading = tutorial.title((ROOT / "tutorials" / f"{name}.py").read_text())
            page = f"tutorials/{name}.md"
            cards.append(
                f"- [![](tutorials/{pictures[0].name})]({page})\n\n    [{heading}]({page})"
            )
    opening = (
        "# Gallery\n\nEach picture was made by the script behind it when this site was built. "
        "Every script takes a few minutes at most on two CPU cores.\n\n"
        '<div class="grid cards" markdown>\n'
    )
    return "\n\n".join([opening, *cards, "</div>"]) + "\n"


def command_line() -> str:
    """The help of every command, as the parsers give it."""
    from fst import cli

    os.environ.update(COLUMNS="88", NO_COLOR="1", TERM="dumb")
    page = [
        "# Command line",
        "Written by the parsers. `fst train RECIPE --help` also lists every field of a recipe. "
        "Guides: [training](training.md), [evaluation](evaluation.md), "
        "[comparisons](compare.md), [exploring](explore.md).",
    ]
    commands = [[], *([name] for name in cli.COMMANDS)]
    commands += [["data", "burgers"], ["data", "darcy"], ["data", "check"]]
    for words in commands:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.run([*words, "--help"])
        page += [f"## `{' '.join(['fst', *words])}`", f"```text\n{printed.getvalue().strip()}\n```"]
    return "\n\n".join(page) + "\n"


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Snippets of source, and links to files of the repository that are pages, or are not."""
    markdown = SOURCE.sub(lambda found: f"```python\n{source(found[1])}\n```", markdown)
    address = page.file.src_uri
    originals = {site: original for original, site in ROOT_PAGES.items()}
    original = originals.get(address, f"docs/{address}")
    if (ROOT / original).is_file():
        markdown = LINK.sub(lambda found: site_link(found, original, address), markdown)
    return markdown


def source(name: str) -> str:
    """The code of a function, method, class or module variable of the package."""
    module, parts = name, []
    while True:
        try:
            value: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
    for part in parts:
        value = getattr(value, part)
    return textwrap.dedent(inspect.getsource(value)).rstrip()


def site_link(found: re.Match[str], original: str, address: str) -> str:
    """A link between files of the repository as one between pages; else its text alone."""
    text, target = found[1], found[2]
    if re.match(r"\w+:|#", target):
        return found[0]
    path, hash_mark, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(original), path))
    if path == "README.md":
        site = "index.md"
    elif path in ROOT_PAGES:
        site = ROOT_PAGES[path]
    elif path == "docs/decisions":
        site = "decisions/0001-what-the-paper-leaves-open.md"
    elif path.startswith("docs/"):
        site = path.removeprefix("docs/")
    else:
        return text
    return (
        f"[{text}]({posixpath.relpath(site, posixpath.dirname(address) or '.')}{hash_mark}{anchor})"
    )


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """Equations as MathML."""

    def mathml(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        tex = found[2].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
        return latex2mathml.converter.convert(tex, display=display)

    return MATH.sub(mathml, html)


def on_post_build(*, config: Any) -> None:
    """Fail where a page would load something from another host."""
    for path in Path(config.site_dir).rglob("*.js"):
        # The theme fetches two things for old browsers and for diagrams, which no page has.
        path.write_text(re.sub(r"https://unpkg\.com/", "missing/", path.read_text()))
    for path in Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(path.read_text()):
            raise PluginError(f"{path}: loads from another host: {found[0]}")
    for path in Path(config.site_dir).rglob("*.css"):
        if found := re.search(r"url\((?:https?:)?//[^)]*\)", path.read_text()):
            raise PluginError(f"{path}: loads from another host: {found[0]}")
