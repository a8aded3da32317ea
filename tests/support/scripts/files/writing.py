# ruff: noqa: PTH123, PTH202, PTH103, PTH208, PTH102, PTH105, SIM115 - a script writes as it likes
"""Writes files in the ways that the arguments name, before, between and after the steps of a training.

Each way returns a function that is called with the loss after every step. What is written is the same in each run.
"""

import atexit
import csv
import logging
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

Path("logs").mkdir(exist_ok=True)
handler = logging.FileHandler("logs/import.log")  # open from here on
logging.getLogger("run").addHandler(handler)


def append():
    def wrote(step, loss):
        with open("log.txt", "a") as log:
            log.write(f"{step} {loss:.6f}\n")

    return wrote


def truncate():
    def wrote(step, loss):
        Path("last.txt").write_text(f"{step} {loss:.6f}\n")
        assert Path("last.txt").read_text().startswith(f"{step} ")
        assert os.path.getsize("last.txt") > 3

    return wrote


def new_folder():
    os.makedirs("run")

    def wrote(step, loss):
        os.makedirs(f"run/{step}")  # new_folder

    return wrote


def numbered():
    number = len([name for name in os.listdir(".") if name.startswith("exp")])
    os.mkdir(f"exp{number}")

    def wrote(step, loss):
        os.makedirs(f"exp{number}", exist_ok=True)
        with open(f"exp{number}/log.csv", "a") as file:
            file.write(f"{step},{loss:.6f}\n")

    return wrote


def database():
    connection = sqlite3.connect("runs.sqlite")
    connection.execute("create table loss (step integer, value real)")
    connection.commit()

    def wrote(step, loss):
        connection.execute("insert into loss values (?, ?)", (step, loss))  # database
        connection.commit()

    return wrote


def records():
    file = open("events.bin", "ab", buffering=0)

    def wrote(step, loss):
        file.write(struct.pack("<qd", step, loss))

    return wrote


def logger():
    return lambda step, loss: logging.getLogger("run").warning("%d %.6f", step, loss)


def fresh_output():
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out")

    def wrote(step, loss):
        with open("out/log", "x" if step == 0 else "r+") as file:
            file.seek(0, 2)
            file.write(f"{loss:.6f}\n")

    return wrote


def table():
    file = open("table.csv", "w", newline="")
    writer = csv.writer(file)
    writer.writerow(["step", "loss"])
    return lambda step, loss: writer.writerow([step, f"{loss:.6f}"])


def checkpoints():
    return lambda step, loss: torch.save(model.state_dict(), f"step{step}.pt")  # checkpoints


def replaced():
    def wrote(step, loss):
        torch.save({"step": step}, "tmp.pt")  # replaced
        os.replace("tmp.pt", "best.pt")

    return wrote


def deleted():
    Path("old.txt").write_text("old")

    def wrote(step, loss):
        Path("old.txt").unlink(missing_ok=True)  # deleted
        Path(f"{step}.txt").touch()

    return wrote


def program():
    code = "import sys; open('by_program', 'a').write(sys.argv[1])"
    return lambda step, loss: subprocess.run([sys.executable, "-S", "-c", code, str(step)], check=True)  # program


def standard_input():
    first = sys.stdin.readline()

    def wrote(step, loss):
        with open("lines", "a") as file:
            file.write(first + sys.stdin.readline())

    return wrote


def shared_memory():
    model.share_memory()

    return lambda step, loss: None


def at_exit():
    atexit.register(lambda: Path("exit.txt").write_text("ended"))
    return lambda step, loss: None


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
all_that_write = [globals()[way]() for way in sys.argv[1:]]
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    for wrote in all_that_write:
        wrote(step, loss.item())
    print(step, f"{loss.item():.17g}")
