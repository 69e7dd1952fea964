"""An object store on this machine that speaks S3, in a thread of this process, while a test needs it.

It is moto's. Moto takes any credentials; this one refuses requests that are not signed with its own key, with the
answer that S3 gives.
"""

import contextlib
import threading

REGION = "us-east-1"
KEY, SECRET = "elephant", "of the tests"
_REFUSED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class ObjectStore:
    """A store, which clients reach by environment variables or by settings of Spark.

    Args:
        url: ``http://host:port``.
    """

    def __init__(self, url):
        self.url = url

    @property
    def place(self):
        """Environment variables that say where it is; pyarrow and AWS' own clients know them."""
        # The Rust clients of Delta are told that there is no TLS.
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": REGION, "AWS_ALLOW_HTTP": "true"}

    @property
    def credentials(self):
        """Environment variables with its key."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    @property
    def settings(self):
        """Settings of Spark for ``s3a://``."""
        settings = {
            "endpoint": self.url,
            "endpoint.region": REGION,
            "path.style.access": "true",
            "access.key": KEY,
            "secret.key": SECRET,
        }
        return {f"spark.hadoop.fs.s3a.{name}": value for name, value in settings.items()}

    def file_system(self):
        """Returns it as pyarrow's file system, whatever the environment says."""
        from pyarrow import fs

        return fs.S3FileSystem(
            access_key=KEY, secret_key=SECRET, region=REGION, endpoint_override=self.url, allow_bucket_creation=True
        )


@contextlib.contextmanager
def object_store(*buckets):
    """Starts a store with empty buckets; yields an `ObjectStore`."""
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        """Leaves the answer to ``Expect: 100-continue`` to Werkzeug: Java's client takes a second one for the last."""

        def handle_expect_100(self):
            return True

        def log_request(self, *_):
            return

    store = DomainDispatcherApplication(create_backend_app)

    def guarded(environ, start_response):
        if f"Credential={KEY}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return store(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [_REFUSED]

    server = make_server("127.0.0.1", 0, guarded, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever, name="object-store", daemon=True)
    thread.start()
    try:
        found = ObjectStore(f"http://127.0.0.1:{server.server_port}")
        for bucket in buckets:
            found.file_system().create_dir(bucket)
        yield found
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
