"""Pages of the site that are kept elsewhere in the checkout, and links that lead out of this folder."""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files of the checkout that are pages of the site, by the page.
PAGES = {
    "index.md": "README.md",
    "jobs.md": "spark_jobs/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(\]\(|<img src=\")(?![a-z]+:|#|/)([^)#\s\"]+)")
_HREF = re.compile(r'(<a href=")(?![a-z]+:|#|/)([^"#]+)(#?[^"]*")')


def on_files(files, config):
    for page, path in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Leads links to files of the checkout to their pages, or to the repository."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: link[1] + _target(link[2], source, page.file.src_uri, config.repo_url), markdown)


def on_page_content(html, page, config, files):
    """Leads the links of notebooks to pages, which MkDocs does not see, and says where the notebook itself is."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = PurePosixPath(page.file.src_uri).parent

    def lead(link):
        path = os.path.normpath(folder / link[2])
        if path.startswith(".."):
            return f"{link[1]}{config.repo_url}/blob/main/{os.path.normpath(f'docs/{path}')}{link[3]}"
        file = files.get_file_from_path(path)
        return link[0] if file is None or file is page.file else link[1] + file.url_relative_to(page.file) + link[3]

    name = PurePosixPath(page.file.src_uri)
    files_of_page = f'<a href="{name.name}" download>notebook</a>, <a href="../{name.stem}.py" download>script</a>'
    return f"<p>This page as a file: {files_of_page}</p>\n{_HREF.sub(lead, html)}"


def _target(link, source, page, repository):
    link, mark, heading = link.partition("#")
    path = os.path.normpath(PurePosixPath(source).parent / link)
    if path in PAGES.values() or path.startswith("docs/"):
        inside = {kept: name for name, kept in PAGES.items()}.get(path, path.removeprefix("docs/"))
        return os.path.relpath(inside, PurePosixPath(page).parent) + mark + heading
    return f"{repository}/blob/main/{path}{mark}{heading}"
