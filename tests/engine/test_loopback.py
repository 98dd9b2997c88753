"""A Ray that is started here is nobody else's."""

import subprocess
import sys

_LISTENERS = """
import psutil
from fsdp_lab.config.sweep import ClusterConfig
from fsdp_lab.engine.cluster import start_ray, stop_ray
start_ray(ClusterConfig())
family = [psutil.Process(), *psutil.Process().children(recursive=True)]
for process in family:
    for connection in process.net_connections(kind="inet"):
        if connection.status == "LISTEN":
            print(process.name(), connection.laddr.ip)
stop_ray()
"""


def test_every_server_of_a_local_ray_listens_on_the_loopback_only():
    out = subprocess.run([sys.executable, "-c", _LISTENERS], capture_output=True, text=True, timeout=120, check=True)
    addresses = {line.split()[-1] for line in out.stdout.splitlines()}
    assert addresses, out.stderr
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
