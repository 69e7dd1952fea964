"""A search for secrets wherever others than those who share them could read: processes, files, Spark's pages, texts."""

import base64
import contextlib
import os
import secrets
import stat
import threading
import traceback
import urllib.request
from pathlib import Path

import psutil

_FILE_BYTES = 1 << 28
_PAGE_S = 10.0
# Pages of an application that Spark serves while it runs, as its users see them and as programs do.
_PAGES = ("jobs/", "stages/", "storage/", "environment/", "executors/", "SQL/")
_LISTS = ("jobs", "stages", "allexecutors", "environment", "storage/rdd", "sql?details=true&planDescription=true")


def forms_of(secret):
    """Returns the bytes that a secret may stand as: itself, and texts of it."""
    forms = {secret, secret.hex().encode(), secret.hex().upper().encode()}
    # A byte before it, or two, shift the digits of base 64.
    for shift in range(3):
        aligned = secret[shift : len(secret) - (len(secret) - shift) % 3]
        forms |= {base64.b64encode(aligned), base64.urlsafe_b64encode(aligned)}
    return forms | {repr(secret)[2:-1].encode(), str(list(secret))[1:-1].encode()}


class SecretSearch:
    """Places in which secrets were found.

    Args:
        secrets: Bytes by name; more may come later.

    Attributes:
        found: Names of secrets with the kind of place and the place itself.
    """

    def __init__(self, secrets):
        self.secrets = secrets
        self.found = set()
        self._forms = {}

    def look_at(self, content, kind, place):
        """Looks for the secrets in bytes."""
        for name, secret in list(self.secrets.items()):
            forms = self._forms.setdefault(name, forms_of(secret))
            if any(form in content for form in forms):
                self.found.add((name, kind, str(place)))

    def look_at_processes(self):
        """Looks at arguments and environment of all processes of this user; returns how many there were."""
        count = 0
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.uids().real != os.getuid():
                    continue
                count += 1
                place = " ".join(process.cmdline()[:4])
                folder = Path("/proc", str(process.pid))
                self.look_at((folder / "cmdline").read_bytes(), "arguments", place)
                self.look_at((folder / "environ").read_bytes(), "environment", place)
        return count

    def look_at_files(self, folder, kind="files"):
        """Looks at all files below a folder, and at their names."""
        # Unlike a glob, a walk bears that folders go meanwhile.
        paths = [os.path.join(place, name) for place, folders, names in os.walk(folder) for name in (*folders, *names)]
        for path in map(Path, paths):
            with contextlib.suppress(OSError):
                about = path.lstat()
                self.look_at(os.fsencode(path), kind, path)
                if stat.S_ISREG(about.st_mode) and about.st_size <= _FILE_BYTES:
                    self.look_at(path.read_bytes(), kind, path)

    def look_at_pages(self, url, application):
        """Looks at Spark's pages of an application; returns how many there were."""
        api = [f"api/v1/applications/{application}/{name}" for name in _LISTS]
        count = 0
        for page in (*_PAGES, *api):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/{page}", timeout=_PAGE_S) as answer:
                self.look_at(answer.read(), "pages", page)
                count += 1
        return count


class TokenWatch:
    """Search for the random bytes that this process draws from here on, while calls go on that wait for it.

    Args:
        canary: A secret that is everywhere, so that a search which finds nothing has looked.
        folders: All files in them are looked at; a folder "events" in one of them has event logs.
        pages: Address of Spark's pages, and the application's id.

    Attributes:
        said: What became of each call, and whether it was looked at while it went on.
    """

    def __init__(self, canary, folders, pages):
        self.said = {}
        self._search = SecretSearch({"canary": canary})
        self._folders, self._pages = folders, pages
        self._drawn, self._draw = [], secrets.token_bytes
        secrets.token_bytes = self._token_bytes

    def call(self, name, folder, function):
        """Calls a function with a folder; looks when there is a file "begun" in it, and makes one "looked" then."""
        os.makedirs(folder)
        before, ended = len(self._drawn), threading.Event()
        watcher = threading.Thread(target=self._look_once, args=(folder, ended))
        watcher.start()
        try:
            function(folder)
            outcome = "ended"
        except Exception as error:
            outcome = type(error).__name__
            self._know_tokens()
            text = traceback.format_exc() + repr(error) + repr(vars(error))
            self._search.look_at(text.encode(), "exceptions", name)
        finally:
            ended.set()
            watcher.join()
        looked = os.path.exists(f"{folder}/looked")
        self.said[name] = {"outcome": outcome, "tokens": len(self._drawn) - before, "looked": looked}

    def look(self):
        """Looks everywhere; returns all that was found so far."""
        self._know_tokens()
        self._search.look_at_processes()
        self._search.look_at_pages(*self._pages)
        for folder in self._folders:
            for name in os.listdir(folder):
                self._search.look_at_files(f"{folder}/{name}", "event log" if name == "events" else "files")
        self._search.look_at_files("/dev/shm")
        return sorted(self._search.found)

    def _token_bytes(self, *arguments):
        self._drawn.append(self._draw(*arguments))
        return self._drawn[-1]

    def _know_tokens(self):
        self._search.secrets.update({f"token {number}": token for number, token in enumerate(self._drawn)})

    def _look_once(self, folder, ended):
        while not ended.wait(0.2):
            has_begun = os.path.exists(f"{folder}/begun")
            self.look()
            if has_begun:
                open(f"{folder}/looked", "w").close()
                return
