"""Step 01: open the weights file.

A real model comes as one file. It must say three things: what the model is (its shape, its
vocabulary), which tensors there are, and their numbers. A GGUF file says them in this order:

    magic     the four letters GGUF
    version   2 or 3
    counts    how many tensors, how many fields
    fields    name, kind, value; name, kind, value; ...      (this is called the metadata)
    tensors   name, shape, packing, where its numbers begin; the next; ...
    padding   up to a multiple of 32 bytes
    numbers   of one tensor after the other

Nothing but the order says what a byte means, so we read from the first byte on and never look
back: take() takes the next value and moves on. The numbers stay on disk until somebody asks for
a tensor. Most of them are quantized: stored with four or five bits each instead of 32, in one of
several packings. This page lets the package gguf unpack them, and step 09 unpacks one by hand.

    python step_01_open-the-weights-file.py

What the numbers mean comes in step 04, which puts them into our model.
"""

import importlib.util
import math
import struct
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli
from shared.checks import Checks
from shared.console import Table, UserError, say

if importlib.util.find_spec("gguf"):  # without it, WeightsFile says what to type
    import gguf

