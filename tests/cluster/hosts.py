"""Hosts made of namespaces: each has an sshd, a home, a network, processes and a /tmp/ray of its own.

What runs on such a host sees nobody else's processes, so even `ray stop`, which ends every Ray process it can find,
stays inside. Killing a host's first process ends all of them, as when a machine is taken away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
LOCAL_CLUSTER = CHECKOUT / "configs/cluster/local.yaml"
LOOPBACK = "127.0.0.1"
DASHBOARD = "--address=http://127.0.0.1:8265"
OBJECT_STORE_BYTES = 80_000_000  # Ray takes no less than 75 MB

_NAMESPACES = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")


def missing() -> str:
    """What this machine lacks for hosts of its own, or nothing."""
    tools = [tool for tool in ("sshd", "ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter") if not _found(tool)]
    if tools:
        return f"not installed: {', '.join(tools)}"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run([*_NAMESPACES, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    return f"namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else ""


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Host:
    """A running host.

    Attributes:
        address: Where its sshd listens, on port 22.
        home: The home folder of whoever logs in.
        key: Of whom it lets in.
        process: Outside its namespaces; all that runs on the host ends with it.
    """

    address: str
    home: Path
    key: Path
    process: subprocess.Popen[bytes]

    def inside(self, *command: str | Path) -> list[str]:
        """The command line that runs a command in the host's network."""
        return ["nsenter", f"--target={self.process.pid}", "--net", *map(str, command)]

    def processes(self) -> list[str]:
        """The command lines of all that runs on the host."""
        mine = self._namespace(self.process.pid, "pid_for_children")
        return [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for pid in os.listdir("/proc")
            if pid.isdigit() and self._namespace(int(pid), "pid") == mine
        ]

    @staticmethod
    def _namespace(pid: int, kind: str) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/{kind}")
        except OSError:  # it has ended, or is not ours to look at
            return ""

    def kill(self) -> None:
        """Takes the host away at once."""
        self.process.kill()
        self.process.wait()


def make_key(path: Path) -> Path:
    """A new ssh key; its public half lies beside it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def start_host(root: Path, address: str, key: Path, *, hidden: Path | None = None) -> Host:
    """Starts a host with its files below `root`, which it shares with all others except for the folder `hidden`."""
    home, ray = root / "home", root / "ray"
    home.mkdir(parents=True)
    for folder in (ray, Path("/tmp/ray"), Path("/run/sshd")):
        folder.mkdir(exist_ok=True)
    (home / ".raysearch").symlink_to(sys.prefix)
    # Some shells read it for Ray's workers, too, whose PYTHONPATH begins with the working directory of their job.
    path = f"${{PYTHONPATH:+$PYTHONPATH:}}{home / 'raysearch'}"
    inherited = ("RAYSEARCH_CACHE_DIR", "RAY_worker_niceness", "RAY_prestart_worker_first_driver")
    own = {"PYTHONPATH": path, **{name: os.environ[name] for name in inherited}}
    (home / ".bashrc").write_text("".join(f"export {name}={value}\n" for name, value in own.items()))
    keys = f"HostKey {make_key(root / 'host_key')}\nAuthorizedKeysFile {key}.pub\n"
    (root / "sshd_config").write_text(f"Port 22\n{keys}PidFile none\nStrictModes no\nUsePAM no\n")
    # Not only $HOME: ssh itself looks up where ~ is.
    passwd = re.sub(r"(?m)^(root:.*):[^:]*(:[^:]*)$", rf"\1:{home}\2", Path("/etc/passwd").read_text(encoding="utf-8"))
    (root / "passwd").write_text(passwd, encoding="utf-8")
    mounts = [f"mount --bind {ray} /tmp/ray", f"mount --bind {root / 'passwd'} /etc/passwd"]
    if hidden:
        mounts.append(f"mount -t tmpfs none {hidden}")
    start = " && ".join(["ip link set lo up", *mounts, f"exec {_found('sshd')} -D -e -f {root / 'sshd_config'}"])
    with (root / "sshd.log").open("wb") as log:
        process = subprocess.Popen([*_NAMESPACES, "sh", "-c", start], stdout=log, stderr=log)
    log_file = root / "sshd.log"
    wait_until(lambda: "Server listening" in log_file.read_text() or process.poll() is not None, "sshd listens")
    assert process.poll() is None, log_file.read_text()
    return Host(address, home, key, process)


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    """Returns as soon as something holds."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)


def link(one: Host, other: Host) -> None:
    """Joins two hosts by a cable of their own."""
    ends = {"near": one, "far": other}
    _ip(f"link add near netns {one.process.pid} type veth peer name far netns {other.process.pid}")
    for device, host in ends.items():
        _ip(f"addr add {host.address} dev lo", host)  # the cable goes with either host, the other's address must not
        _ip(f"link set {device} up", host)
        _ip(f"route add default dev {device} src {host.address}", host)  # where Ray looks for the host's address


def _ip(arguments: str, host: Host | None = None) -> None:
    command = ["ip", *arguments.split()]
    subprocess.run(host.inside(*command) if host else command, check=True, capture_output=True)


class Cluster:
    """`ray up` and its kin on hosts, from the shipped file for machines of one's own."""

    def __init__(self, root: Path, head: Host, workers: Sequence[Host] = (), *, cpus: int = 1) -> None:
        self.head, self.workers, self._root = head, workers, root
        # Ray reads all files of the folder that it sends, those that it leaves out too: here other tests write some.
        self._checkout = root / "checkout"
        kept = ("--exclude=.git", "--filter=dir-merge,- .gitignore")
        subprocess.run(["rsync", "--archive", *kept, f"{CHECKOUT}/", self._checkout], check=True)
        self.file = root / "cluster.yaml"
        self.file.write_text(yaml.safe_dump(self._config(cpus)), encoding="utf-8")

    def _config(self, cpus: int) -> dict[str, Any]:
        config = yaml.safe_load(LOCAL_CLUSTER.read_text(encoding="utf-8"))
        config["cluster_name"] = f"test-{os.getpid()}-{self._root.name}"
        config["provider"] |= {"head_ip": self.head.address, "worker_ips": [host.address for host in self.workers]}
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.head.key)}
        # The hosts use the environment that is there: .raysearch is a link to it.
        config["setup_commands"] = [command for command in config["setup_commands"] if "pip install" not in command]
        for name in ("head_start_ray_commands", "worker_start_ray_commands"):
            config[name][-1] += f" --num-cpus={cpus} --object-store-memory={OBJECT_STORE_BYTES}"
        return config

    def ray(self, verb: str, *arguments: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """`ray VERB CLUSTER.YAML ARGUMENTS`, from the root of a checkout as it is sent."""
        return self.command("ray", verb, self.file, *arguments, timeout=timeout)

    def job(
        self, *command: str | Path, working_dir: Path | None = None, options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """`ray job submit` of a command with a folder as it is, the checkout by default, followed until its end."""
        submit = ("ray", "job", "submit", DASHBOARD, f"--working-dir={working_dir or self._checkout}", *options)
        return self.command(*submit, "--", *command)

    def command(self, name: str, *arguments: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """A command of this environment, in the head's network but with the caller's files and processes."""
        with self.start(name, *arguments) as process:
            try:
                printed, stderr = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, printed, stderr)

    def start(self, name: str, *arguments: str | Path) -> subprocess.Popen[str]:
        """The same, still running."""
        return subprocess.Popen(
            self.head.inside(Path(sys.prefix) / "bin" / name, *arguments),
            cwd=self._checkout,
            env={**os.environ, "TMPDIR": str(self._root), "RAY_TMPDIR": str(self._root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
