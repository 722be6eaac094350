"""The job that every contestant runs: says that it runs, then prints a bar twice a second until it is killed."""

import os
import sys
import time

work = sys.argv[1]
os.makedirs(work, exist_ok=True)
with open(os.path.join(work, "started.tmp"), "w", encoding="ascii") as file:
    file.write(f"{time.time():.6f} {os.getpid()}")
os.rename(os.path.join(work, "started.tmp"), os.path.join(work, "started"))
for i in range(7200):
    print(f"\rsamples:  {i / 72:.0f}%|###   | {i}/7200 [00:{i % 60:02d}<09:59,  2.00it/s]", end="", flush=True)
    if i % 4 == 0:
        print(f"\nINFO step {i} loss {1 / (i + 1):.3f}", flush=True)
    time.sleep(0.5)
