"""What makes processes of pods: scheduler, kubelet, name service and garbage collector of a cluster, in one thread.

A pod is a process namespace of this machine in a network namespace, with an address, a name and files of its own (see
`pod_sandbox`). Everything is read from the API and written to it; nothing here knows Spark.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import psutil
from spark_daemons import end_with_children, end_with_parent

SANDBOX = Path(__file__).with_name("pod_sandbox.py")
_SYNC_S = 0.2
# After SIGTERM; Kubernetes itself gives 30 s.
_GRACE_S = 5.0
_JOIN_S = 60.0
_NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--uts", "--ipc")
_OWNED = ("pods", "services", "configmaps", "persistentvolumeclaims")


@dataclass(frozen=True)
class Image:
    """What all containers start with.

    Args:
        variables: Its environment.
        mounts: Folders and files of this machine, by path in the container.
        entry_point: What runs where the specification of a pod names no command.
    """

    variables: dict[str, str]
    mounts: dict[str, str]
    entry_point: tuple[str, ...]


@dataclass
class RunningPod:
    """A pod whose processes were started.

    Args:
        body: As the API has it.
        host: The network namespace that it runs in.
        folder: Its files.
        process: `subprocess.Popen` of what contains all its processes.
        killed_for: Why it was killed, as the status of its container says.
        end_by: When it is killed, of one that was deleted.
    """

    body: dict
    host: object
    folder: Path
    process: subprocess.Popen
    killed_for: str = ""
    end_by: float | None = None
    started_at: str = field(default_factory=lambda: _now())

    def status(self):
        """Returns the status as the API has it."""
        code = self.process.poll()
        # What contains the processes ends by the same signal as they.
        code = 128 - code if code is not None and code < 0 else code
        container = self.body["spec"]["containers"][0]
        ended = {"exitCode": code, "startedAt": self.started_at, "finishedAt": _now()}
        ended["reason"] = self.killed_for or ("Error" if code else "Completed")
        state = {"running": {"startedAt": self.started_at}} if code is None else {"terminated": ended}
        return {
            "phase": "Running" if code is None else "Failed" if code else "Succeeded",
            "podIP": self.host.address,
            "podIPs": [{"ip": self.host.address}],
            "startTime": self.started_at,
            # Spark's driver waits until its own pod is ready.
            "conditions": [{"type": "Ready", "status": str(code is None)}],
            "containerStatuses": [
                {
                    **{"name": container["name"], "image": container["image"], "imageID": container["image"]},
                    **{"ready": code is None, "started": code is None, "restartCount": 0, "state": state},
                }
            ],
        }


class Kubelet:
    """The thread, from ``with`` to the end of the block.

    Args:
        api: A `kubernetes_api.KubernetesApi`.
        hosts: Network namespaces; each holds one pod at a time, and there is no room for more.
        image: What containers start with, whatever image they name.
        folder: Where files of pods lie.

    Attributes:
        next_machine_at: Before that time of `time.monotonic`, no pod starts: the machine for it is on its way.
    """

    def __init__(self, api, hosts, image, folder):
        self.next_machine_at = 0.0
        self._api, self._image, self._folder = api, image, folder
        # The one that was free for longest comes first: a pod that replaces another one has another address.
        self._free = deque(hosts)
        self._pods, self._known = {}, set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="test-kubelet")

    def __enter__(self):
        self._folder.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends all pods."""
        self._closing.set()
        self._thread.join(_JOIN_S)
        end_with_children([pod.process for pod in self._pods.values()])

    def kill(self, name, reason="OOMKilled"):
        """Kills a pod's processes, as the kernel does with one that takes more memory than its limit.

        Args:
            name: Of the pod.
            reason: What the status of its container says of it.
        """
        with self._lock:
            pod = next(pod for pod in self._pods.values() if pod.body["metadata"]["name"] == name)
            pod.killed_for = reason
            pod.process.kill()

    def processes(self, name):
        """Returns the processes of a pod (`psutil.Process`)."""
        with self._lock:
            pods = [pod for pod in self._pods.values() if pod.body["metadata"]["name"] == name]
        return [process for pod in pods for process in psutil.Process(pod.process.pid).children(recursive=True)]

    def logs(self):
        """Returns what pods have printed, by name, also those that are gone."""
        paths = sorted(self._folder.glob("*/log"))
        return {path.parent.name: path.read_text(errors="replace") for path in paths}

    def _work(self):
        while not self._closing.wait(_SYNC_S):
            with self._lock:
                self._sync(self._api.list("pods"))

    def _sync(self, bodies):
        known = {body["metadata"]["uid"]: body for body in bodies}
        if self._known - known.keys():
            self._collect_garbage()
        self._known = set(known)
        for uid, pod in list(self._pods.items()):
            self._follow(uid, pod, is_deleted=uid not in known)
        for uid, body in known.items():
            has_room = self._free and time.monotonic() >= self.next_machine_at
            if has_room and body["status"]["phase"] == "Pending" and uid not in self._pods:
                self._start(uid, body)
        self._tell_names()

    def _collect_garbage(self):
        """Deletes what belongs to pods that are gone."""
        owned = [(kind, body["metadata"]) for kind in _OWNED for body in self._api.list(kind)]
        # After what they own: a pod that is made meanwhile must not count as gone.
        known = {body["metadata"]["uid"] for body in self._api.list("pods")}
        for kind, meta in owned:
            owners = {owner["uid"] for owner in meta.get("ownerReferences", [])}
            if owners and not owners & known:
                self._api.delete(kind, meta["namespace"], meta["name"])

    def _follow(self, uid, pod, *, is_deleted):
        if pod.process.poll() is not None:
            del self._pods[uid]
            self._free.append(pod.host)
            if not is_deleted:
                self._write_status(pod)
        elif is_deleted and pod.end_by is None:
            pod.end_by = time.monotonic() + _GRACE_S
            with contextlib.suppress(psutil.Error):
                for first in psutil.Process(pod.process.pid).children():
                    first.send_signal(signal.SIGTERM)
        elif is_deleted and time.monotonic() > pod.end_by:
            pod.process.kill()

    def _write_status(self, pod):
        meta = pod.body["metadata"]
        self._api.set_status("pods", meta["namespace"], meta["name"], pod.status())

    def _start(self, uid, body):
        volumes = self._volumes(body)
        if volumes is None:
            return
        meta, (container,) = body["metadata"], body["spec"]["containers"]
        host, folder = self._free.popleft(), self._folder / meta["name"]
        (folder / "root").mkdir(parents=True, exist_ok=True)
        mounts = {**self._image.mounts, "/dev/shm": {"size": "64m"}, **_mounted(container, volumes)}
        mounts.update({f"/etc/{name}": str(folder / name) for name in ("hosts", "resolv.conf")})
        for name in ("hosts", "resolv.conf"):
            (folder / name).write_text("")
        command = container.get("command") or self._image.entry_point
        sandbox = {
            **{"root": str(folder / "root"), "hostname": meta["name"], "mounts": mounts},
            "command": [*command, *container.get("args", [])],
        }
        variables = {one["name"]: _value(one, meta, host) for one in container.get("env", [])}
        with open(folder / "log", "ab") as log:
            process = subprocess.Popen(
                [*host.prefix, *_NAMESPACES, sys.executable, "-I", str(SANDBOX), json.dumps(sandbox)],
                env={**self._image.variables, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self._pods[uid] = pod = RunningPod(body, host, folder, process)
        # Others know its name before they know that it runs.
        self._tell_names()
        self._write_status(pod)

    def _volumes(self, body):
        """Returns what each volume of a pod is; None where something is not there yet, and the pod has to wait."""
        namespace, found = body["metadata"]["namespace"], {}
        for volume in body["spec"].get("volumes", []):
            folder = self._folder / body["metadata"]["name"] / "volumes" / volume["name"]
            if "configMap" in volume:
                data = self._api.get("configmaps", namespace, volume["configMap"]["name"])
                if data is None:
                    return None
                _write_files(folder, data.get("data", {}), volume["configMap"].get("items"))
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                if self._api.get("persistentvolumeclaims", namespace, claim) is None:
                    return None
            in_memory = volume.get("emptyDir", {}).get("medium") == "Memory"
            folder.mkdir(parents=True, exist_ok=True)
            size = volume.get("emptyDir", {}).get("sizeLimit", "50%").removesuffix("i")
            found[volume["name"]] = {"size": size} if in_memory else str(folder)
        return found

    def _tell_names(self):
        """Writes what each pod can resolve: itself, and every service as the addresses of the pods that it selects."""
        lines = ["127.0.0.1 localhost"]
        for service in self._api.list("services"):
            meta, chosen = service["metadata"], service["spec"].get("selector", {}).items()
            name = f"{meta['name']}.{meta['namespace']}.svc"
            for pod in self._pods.values():
                if chosen and chosen <= pod.body["metadata"].get("labels", {}).items():
                    lines.append(f"{pod.host.address} {name} {name}.cluster.local")
        for pod in self._pods.values():
            own = f"{pod.host.address} {pod.body['metadata']['name']}"
            (pod.folder / "hosts").write_text("\n".join([*lines, own, ""]))


def _now():
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _value(variable, meta, host):
    """Returns what a variable of a container is."""
    if "valueFrom" not in variable:
        return variable.get("value", "")
    values = {"status.podIP": host.address, "metadata.name": meta["name"], "metadata.namespace": meta["namespace"]}
    return values[variable["valueFrom"]["fieldRef"]["fieldPath"]]


def _mounted(container, volumes):
    """Returns what lies where, by path."""
    found = {}
    for mount in container.get("volumeMounts", []):
        source, below = volumes[mount["name"]], mount.get("subPath")
        found[mount["mountPath"]] = str(Path(source) / below) if below else source
    return found


def _write_files(folder, data, items):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chosen = {item["key"]: item["path"] for item in items} if items else dict(zip(data, data, strict=True))
    for key, path in chosen.items():
        (folder / path).write_text(data[key])
