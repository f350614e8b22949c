"""Hosts on one machine: each has its own network, processes, name, /tmp, /local, /dev/shm, keys, tokens and caches, an
ssh server, and this machine's installation. They share only the files in SHARED. They need root, ip, sshd and pdsh.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit import ROOT, command_environment, wait_until

SHARED = "/srv/shared"  # as the hosts see it
GATE = "10.77.0.1"  # this machine, from the hosts
TOOLS = ("ip", "unshare", "nsenter", "sshd", "ssh-keygen", "pdsh")
ABSENT_TOOLS = [name for name in TOOLS if shutil.which(name) is None]
NEEDED = f"two hosts need root and {', '.join(ABSENT_TOOLS) or 'nothing else'}"
MISSING = NEEDED if ABSENT_TOOLS or os.geteuid() else ""
# Folders of each host; the rest of /root may hold this machine's Python.
OWN_FOLDERS = ("root/.ssh", "root/.ray", "root/.cache", "tmp", "local")
# The first process of a host: the host ends with it. The host sees a checkout in /tmp, too.
BOOT = """
set -e
hostname "$1"
mkdir -p /srv/shared /run/sshd
mount --bind "$2/etc/hosts" /etc/hosts
case $6 in /tmp/*) mkdir -p "$2$6" && mount --bind "$6" "$2$6" ;; esac
for own in ${5}; do mkdir -p "/$own" && mount --rbind "$2/$own" "/$own"; done
mount --bind "$3" /srv/shared
mount -t tmpfs tmpfs /dev/shm
until ip link show eth0 >/dev/null 2>&1; do sleep 0.1; done
ip link set lo up && ip addr add "$4/24" dev eth0 && ip link set eth0 up
exec /usr/sbin/sshd -D -e -o PermitRootLogin=yes -o StrictModes=no -o HostKey=/root/.ssh/id_ed25519 -o PidFile=none
"""


@dataclass
class Host:
    name: str
    address: str
    folder: Path  # its own files
    shared: Path
    process: subprocess.Popen | None = None
    log: list[str] = field(default_factory=list)

    def start(self) -> None:
        arguments = self.name, str(self.folder), str(self.shared), self.address, " ".join(OWN_FOLDERS), str(ROOT)
        boot = ["bash", "-c", BOOT, "boot", *arguments]
        spaces = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / "boot.log").open("w") as log:
            self.process = subprocess.Popen([*spaces, *boot], stdout=log, stderr=log)
        wait_until(lambda: self._first() is not None)
        card = f"02:00:0a:4d:00:{int(self.end.removeprefix('jk')):02x}"  # its own again after a death: others know it
        peer = ("peer", "name", "eth0", "address", card, "netns", str(self._first()))
        ip("link", "add", self.end, "type", "veth", *peer)
        ip("link", "set", self.end, "master", "jkbridge", "up")
        wait_until(lambda: self.run("ssh", "-o", "ConnectTimeout=1", self.name, "true").returncode == 0)

    @property
    def end(self) -> str:
        """The name of its network cable's end on this machine."""
        return f"jk{self.address.rpartition('.')[2]}"

    def _first(self) -> int | None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def command(self, *words: str, **environment: str) -> list[str]:
        """Return the words that run a command on the host, from this machine."""
        inside = ["nsenter", f"--target={self._first()}", "--mount", "--uts", "--net", "--pid"]
        variables = command_environment(**environment)
        keep = ("PATH", "DS_ACCELERATOR", *environment)
        settings = [f"{name}={variables[name]}" for name in keep if name in variables]
        return [*inside, "env", "-i", "HOME=/root", *settings, "bash", "-c", 'cd /root; exec "$@"', "bash", *words]

    def run(self, *words: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*words, **environment), capture_output=True, text=True, timeout=timeout)

    def start_command(self, log: Path, *words: str, **environment: str) -> subprocess.Popen:
        with log.open("w") as out:
            return subprocess.Popen(self.command(*words, **environment), stdout=out, stderr=subprocess.STDOUT)

    def die(self) -> None:
        """Cut the host off as a power failure does: its network is gone, and all its processes end at once."""
        ip("link", "del", self.end)
        os.kill(self._first(), signal.SIGKILL)
        self.process.wait()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def started(*names: str) -> Iterator[list[Host]]:
    base = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))
    (base / "shared").mkdir()
    hosts = [Host(name, f"10.77.0.{11 + number}", base / name, base / "shared") for number, name in enumerate(names)]
    for leftover in ("jkbridge", *(host.end for host in hosts)):  # left by a session that was killed
        subprocess.run(["ip", "link", "del", leftover], capture_output=True, check=False)
    ip("link", "add", "jkbridge", "type", "bridge")
    try:
        ip("addr", "add", f"{GATE}/24", "dev", "jkbridge")
        ip("link", "set", "jkbridge", "up")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / "key")], check=True)
        hosts_file = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
        for host in hosts:
            for name in (*OWN_FOLDERS, "etc"):
                (host.folder / name).mkdir(parents=True)
            (host.folder / "etc/hosts").write_text(hosts_file)
            ssh = host.folder / "root/.ssh"
            shutil.copy(base / "key", ssh / "id_ed25519")
            shutil.copy(base / "key.pub", ssh / "authorized_keys")
            options = ("StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", "LogLevel ERROR")
            # Without ServerAliveInterval, ssh waits for a dead host.
            (ssh / "config").write_text("\n".join((*options, "ServerAliveInterval 15", "")))
            host.start()
        yield hosts
    finally:
        for host in hosts:
            if host.process is not None and host.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.CalledProcessError):
                    host.die()
        ip("link", "del", "jkbridge")
        time.sleep(0.5)
        shutil.rmtree(base, ignore_errors=True)


def code() -> str:
    """Return PYTHONPATH for each host, where the checkout is not installed."""
    return f"{ROOT}:{ROOT / 'infra/command'}"
