"""Follows FP8 numbers through a kernel's machine code (SASS), to find bytes that are stored too late.

ptxas 12.8 can merge two conversions into one register and yet read a byte of the first from the register that
had it in the loop's pass before. So of every block of code that packs FP8 this runs the instructions that
move bytes, on symbols. Opcodes: docs.nvidia.com/cuda/cuda-binary-utilities.
"""

import re
import subprocess
from functools import partial
from pathlib import Path

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?(\S+)\s*(.*?) ;")


def disassemble(cubin, triton_folder, folder):
    """Returns the blocks of a kernel's code: lists of (opcode, operands)."""
    path = Path(folder, "kernel.cubin")
    path.write_bytes(cubin)
    tool = Path(triton_folder, "backends", "nvidia", "bin", "nvdisasm")
    sass = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    blocks = [[]]
    for line in sass.splitlines():
        ends = re.match(r"\.L_x_\d+:", line.strip()) is not None  # a label: the next block begins
        found = INSTRUCTION.search(line)
        if found:
            opcode, operands = found.groups()
            blocks[-1].append((opcode, operands.replace(".reuse", "").split(", ")))
            if opcode.split(".")[0] in ("BRA", "EXIT", "CALL"):
                ends = True
        if ends:
            blocks.append([])
    return blocks


def packs_fp8(block):
    for opcode, _ in block:
        if opcode.startswith("F2FP") and re.search("E[45]M[23].F32", opcode):
            return True
    return False


def stored_bytes(opcode):
    """Returns how many bytes a store of one or two bytes stores, and 0 for a larger one."""
    if ".U8" in opcode:
        return 1
    if ".U16" in opcode:
        return 2
    return 0


def written_registers(opcode):
    """Returns how many registers of four bytes an instruction writes."""
    if ".128" in opcode:
        return 4
    if ".64" in opcode or "WIDE" in opcode:
        return 2
    return 1


def read(registers, operand):
    return registers.setdefault(operand, [f"{operand} before"] * 4)


def stale_stores(blocks):
    """Returns the stores of one or two bytes that come from before their block, if it packs FP8."""
    stale = []
    for block in blocks:
        if not packs_fp8(block):
            continue
        registers = {"RZ": ["zero"] * 4}
        get = partial(read, registers)
        for place, (opcode, operands) in enumerate(block):
            name = opcode.split(".")[0]
            out = operands[0]
            if name == "STS":
                stored = get(operands[-1])[: stored_bytes(opcode)]
                if "before" in " ".join(stored):
                    stale.append((opcode, operands))
            elif "PACK_AB_MERGE_C" in opcode:  # two new bytes, and two of the last operand
                registers[out] = [f"pack {place}"] * 2 + get(operands[3])[:2]
            elif name == "PRMT" and operands[2].startswith("0x"):
                source = get(operands[1]) + get(operands[3])
                selectors = int(operands[2], 16)
                registers[out] = [source[selectors >> 4 * i & 7] for i in range(4)]
            elif name == "LOP3" and operands[2:5:2] == ["0xffff", "0xc0"]:
                registers[out] = get(operands[1])[:2] + ["zero"] * 2
            elif name == "SHF" and ".R." in opcode and operands[1:3] == ["RZ", "0x8"]:
                registers[out] = get(operands[3])[1:] + ["zero"]
            elif name in ("MOV", "IMAD") and ".MOV" in f".{opcode}" and operands[-1].startswith("R"):
                registers[out] = list(get(operands[-1]))
            elif re.fullmatch(r"R\d+", out):
                for i in range(written_registers(opcode)):
                    registers[f"R{int(out[1:]) + i}"] = [opcode] * 4
    return stale
