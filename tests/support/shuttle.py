"""The cable of `tests.netem`: two TUN devices in two network namespaces, joined by this process in user space.

Run as root:  shuttle.py NEAR FAR CONTROL_SOCKET.  Packets are delayed, lost or swallowed as told over the unix
datagram socket by JSON such as {"delay_ms": 75, "loss": 0.01, "up": false}; real TCP does the rest.
Standard library only; must not import the product.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NEAR_ADDRESS, FAR_ADDRESS = "10.99.0.1", "10.99.0.2"


def tun(name: str) -> int:
    """Descriptor of a new TUN device."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22s", name.encode(), IFF_TUN | IFF_NO_PI, b""))
    return fd


def run(*argv: str) -> None:
    """Run `ip`; its failure is ours."""
    subprocess.run(argv, check=True)


def main(near: str, far: str, control: str) -> None:
    """Shuttle packets until killed."""
    devices = (f"t{os.getpid()}a", f"t{os.getpid()}b")
    fds = tuple(tun(name) for name in devices)
    for space, device, address, peer in (
        (near, devices[0], NEAR_ADDRESS, FAR_ADDRESS), (far, devices[1], FAR_ADDRESS, NEAR_ADDRESS),
    ):  # fmt: skip
        run("ip", "link", "set", device, "netns", space)
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "addr", "add", address, "peer", peer, "dev", device)
        run("ip", "-n", space, "link", "set", device, "mtu", "1500", "txqueuelen", "4000", "up")
    commands = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    commands.bind(control)
    settings: dict[str, float] = {"delay_ms": 0.0, "loss": 0.0, "up": 1.0}
    queue: list[tuple[float, int, int, bytes]] = []
    number, dice = 0, random.Random(1)
    print("up", flush=True)
    while True:
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([*fds, commands], [], [], wait_s)
        now = time.monotonic()
        for source in ready:
            if source is commands:
                data, sender = commands.recvfrom(4096)
                settings.update({key: float(value) for key, value in json.loads(data).items()})
                if sender:
                    commands.sendto(b"ok", sender)
                continue
            for _ in range(64):
                try:
                    packet = os.read(source, 65536)
                except BlockingIOError:
                    break
                if not settings["up"] or dice.random() < settings["loss"]:
                    continue
                number += 1
                target = fds[1] if source == fds[0] else fds[0]
                heapq.heappush(queue, (now + settings["delay_ms"] / 1000.0, number, target, packet))
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(queue)
            try:
                os.write(target, packet)
            except OSError:
                continue


if __name__ == "__main__":
    main(*sys.argv[1:4])
