#!/usr/bin/env python3
"""Prints registers and stack of every compiled kernel, and fails if one spills, has its wgmma serialised or keeps the
registers it was launched with, or if all took too long to build.

usage: kernel-report.py OUT_DIR     the output folder of the crate's build script
Needs cuobjdump on PATH.
"""
import pathlib
import re
import subprocess
import sys

# What building may take, on two cores.
SECONDS = 300
# Element types in the names of C++.
ELEMENTS = {"4Bf16": "bf16", "3F16": "f16", "3F32": "f32"}

out = pathlib.Path(sys.argv[1])
objects = sorted(out.glob("flash_*/*.o"))
if not objects:
    sys.exit(f"kernel-report.py: no objects below {out}")
faults = []
kernels = 0
for path in objects:
    text = subprocess.run(["cuobjdump", "--dump-resource-usage", path], check=True, capture_output=True, text=True).stdout
    arch = "?"
    for line in text.splitlines():
        if found := re.search(r"arch = (\w+)|Fatbin elf code|sm_\d+\w*", line):
            arch = found.group(1) or (found.group(0) if found.group(0).startswith("sm_") else arch)
        if found := re.match(r"\s*Function (\S+):", line):
            function = found.group(1)
        if found := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, found.groups())
            element = next((name for tag, name in ELEMENTS.items() if tag in function), "")
            modes = re.search(r"ScoreMode(\d)E", function)
            mode = ["plain", "linear", "softcap"][int(modes.group(1))] if modes else ""
            print(f"{path.parent.name:36} {arch:6} {element:4} {mode:8} {registers:4} registers, stack {stack}, shared {shared}")
            kernels += 1
            if stack or local:
                faults.append(f"{path.parent.name} {arch} {element} {mode}: stack {stack}, local {local}")
    # A product that is waited for at once ends a group; so does the last of each batch.
    code = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
    for function in code.split("Function : ")[1:]:
        products = re.findall(r"HGMMA[^;]*", function)
        if 2 * sum("gsb0" in product for product in products) > len(products):
            faults.append(f"{path.parent.name} {function.split()[0]}: wgmma is serialised")
        # One warpgroup gives registers, the others take them; where the compiler cannot, it says so nowhere else.
        if products:
            used = 1 + max(int(register) for register in re.findall(r"\bR(\d+)\b", function))
            print(f"{path.parent.name:36} {function.split()[0][-40:]}: {used} registers of those that compute")
            if function.count("USETMAXREG") < 2:
                faults.append(f"{path.parent.name} {function.split()[0]}: setmaxnreg is ignored")
size = sum(path.stat().st_size for path in out.glob("libflash_*.a"))
compiled, seconds = map(int, (out / "compiled").read_text().split())
if seconds > SECONDS:
    faults.append(f"built in {seconds} s, more than {SECONDS}")
how = "all" if compiled == len(objects) else f"the last {compiled}, not all,"
print(f"{kernels} kernels in {len(objects)} objects, {size / 1e6:.1f} MB of libraries, {how} built in {seconds} s")
if faults:
    sys.exit("not as they must be:\n" + "\n".join(faults))
