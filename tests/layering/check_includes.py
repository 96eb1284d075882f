#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the table of who may include whom, over every source file of the tree.

    check_includes.py ROOT      checks; prints one line per violation, exit 1 if there is any
    check_includes.py --self-test
"""
import os
import re
import sys
import tempfile

SOURCE = re.compile(r"\.(cc|cpp|c|cu|h|hpp|cuh)$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')

# A folder of the tree, as the rules see it. The first match counts.
AREAS = [
    ("base", r"client/include/weightd/(status|types)\.h|client/base/.*"),
    ("public", r"client/include/weightd/.*"),
    ("client", r"client/.*"),
    ("tile", r"store/(tile_layout\.h|f12_tile-inl\.h)"),
    ("store", r"store/.*"),
    ("kernels", r"kernels/.*"),
    ("ipc/cuda", r"ipc/(cuda_driver|vmm)\..*"),
    ("ipc", r"ipc/.*"),
    ("loader", r"daemon/loader/.*"),
    ("daemon", r"daemon/.*"),
    ("tools/gpu", r"tools/bench/gpu/.*"),
    ("tools/deep", r"tools/(pack|bench)/.*"),
    ("tools/cli", r"tools/cli/.*"),
    ("tools", r"tools/.*"),
    ("tests/reference", r"tests/reference/.*"),
    ("tests", r"tests/.*"),
]
ALL_OURS = {name for name, _ in AREAS}
MAY_INCLUDE = {
    "base": {"base"},
    "public": {"base", "public"},
    "tile": {"tile"},
    "store": {"base", "tile", "store"},
    "kernels": {"base", "tile", "kernels"},
    "ipc": {"base", "ipc"},
    "ipc/cuda": {"base", "ipc", "ipc/cuda"},
    "daemon": {"base", "store", "tile", "ipc", "daemon"},
    "loader": {"base", "store", "tile", "ipc", "daemon", "loader", "kernels", "ipc/cuda"},
    "client": {"base", "public", "client", "ipc", "ipc/cuda", "kernels", "tile"},
    "tools": {"base", "public", "tools", "tools/cli"},
    "tools/cli": {"base", "public", "tools/cli"},
    "tools/deep": {"base", "public", "tools/cli", "tools/deep", "tools/gpu", "store", "tile", "kernels"},
    "tools/gpu": {"base", "public", "tools/cli", "tools/deep", "tools/gpu", "store", "tile", "kernels"},
    "tests": ALL_OURS,
    "tests/reference": {"base", "public", "tests/reference"},
}

# Libraries by their heads, and the areas that may see them.
LIBRARIES = [
    ("Asio", r"boost/asio(/|\.hpp).*", {"ipc", "daemon", "loader"}),
    ("Cap'n Proto", r"(capnp|kj)/.*|.*\.capnp\.h", {"ipc", "daemon", "loader", "store"}),
    ("CUDA", r"(cuda|cub|thrust|cooperative_groups)(/|\.h|_|[A-Z]).*|cublas.*|nvml\.h|mma\.h",
     {"kernels", "ipc/cuda", "loader", "client", "tools/gpu"}),
    ("Highway", r"hwy/.*", {"store", "tile", "kernels"}),
    ("xxHash", r"xxhash\.h", {"store", "tests/reference"}),
    ("OpenSSL", r"openssl/.*", {"store", "tests/reference"}),
    ("JSON", r"nlohmann/.*", {"store", "daemon", "tools", "tools/cli", "tools/deep", "tests/reference"}),
    ("spdlog, fmt", r"(spdlog|fmt)/.*", {"daemon", "loader"}),
    ("toml++", r"toml\+\+/.*", {"daemon"}),
    ("systemd", r"systemd/.*", {"daemon"}),
    ("CLI11", r"CLI/.*", {"daemon", "loader", "tools", "tools/cli", "tools/deep"}),
    ("GoogleTest", r"(gtest|gmock)/.*", set()),
    ("Google Benchmark", r"benchmark/.*", {"tools/deep"}),
    # The operating system: everywhere but in the tile layout, which device code uses, and in the public heads.
    ("POSIX and Linux", r"((sys|linux|netinet|arpa|asm|net)/)?[a-z0-9_]+\.h", ALL_OURS - {"tile", "public"}),
]
STANDARD = set(
    """algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits clocale
    cmath compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint cstdio cstdlib cstring
    ctime cuchar cwchar cwctype deque exception execution filesystem format forward_list fstream functional future
    initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale map memory memory_resource mutex new
    numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore set shared_mutex source_location
    span sstream stack stdexcept stop_token streambuf string string_view syncstream system_error thread tuple type_traits typeindex
    typeinfo unordered_map unordered_set utility valarray variant vector version""".split())


def area_of(path):
    return next((name for name, pattern in AREAS if re.fullmatch(pattern, path)), None)


def library_of(head):
    return next(((name, allowed) for name, pattern, allowed in LIBRARIES if re.fullmatch(pattern, head)), None)


def resolve(root, head):
    """The file in the tree that `head` names from the include folders, or None."""
    for folder in ("client/include/", "client/", ""):
        path = os.path.normpath(folder + head)
        # "client/x.h" is written from the root; "weightd/x.h" and "base/x.h" are the two exceptions.
        if folder and not head.startswith({"client/include/": "weightd/", "client/": "base/"}[folder]):
            continue
        if os.path.isfile(os.path.join(root, path)):
            return path
    return None


def complaint(root, path, head, quoted):
    """What is wrong with this include of `path`, or None."""
    area = area_of(path)
    if area is None:
        return "lies in a folder that the table does not know"
    generated = re.fullmatch(r"(\w+)/[\w/]+\.capnp\.h", head)
    if generated and area != "tests" and area_of(path) != generated.group(1):
        return f"{area} may not include the generated head of {generated.group(1)}"
    if quoted and not generated:
        target = resolve(root, head)
        if target is not None:
            wanted = area_of(target)
            return None if wanted in MAY_INCLUDE[area] else f"{area} may not include {wanted}"
        beside = os.path.join(root, os.path.dirname(path), head)
        if area == "tests" and os.path.isfile(beside):
            return None
        if "/" not in head or library_of(head) is None:
            return "is not written from the root, or does not exist"
    if head in STANDARD:
        return None
    library = library_of(head)
    if library is None:
        return "is a head of no library that the table knows"
    if area == "tests" or area in library[1]:
        return None
    return f"{area} may not include {library[0]}"


def source_files(root):
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "build"
                          and not (folder != root and n == "corpus"))
        for name in sorted(files):
            if SOURCE.search(name):
                yield os.path.relpath(os.path.join(folder, name), root)


def check(root):
    """All violations as lines for people; also how many files were read."""
    problems, count = [], 0
    for path in source_files(root):
        count += 1
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                head = match.group(1) or match.group(2)
                wrong = complaint(root, path, head, match.group(1) is not None)
                if wrong:
                    problems.append(f"{path}:{number}: '{head}': {wrong}")
    return problems, count


def self_test():
    """Plants one violation of every rule between lines that are right, and expects exactly those."""
    tree = {
        "client/include/weightd/status.h": ("#include <string>\n", None),
        "client/include/weightd/client.h": ('#include "weightd/status.h"\n', None),
        "client/base/fd.h": ('#include <unistd.h>\n#include "weightd/status.h"\n', None),
        "store/tile_layout.h": ("#include <cstdint>\n", None),
        "store/bundle.h": ('#include <xxhash.h>\n#include "base/fd.h"\n#include "store/tile_layout.h"\n', None),
        "ipc/channel.h": ('#include <capnp/message.h>\n#include "ipc/protocol.capnp.h"\n#include <boost/asio/io_context.hpp>\n', None),
        "ipc/cuda_driver.h": ("#include <cuda.h>\n", None),
        "ipc/vmm.h": ('#include "base/fd.h"\n#include "ipc/cuda_driver.h"\n', None),
        "kernels/cpu/gemm.h": ('#include "store/tile_layout.h"\n#  include <hwy/highway.h>\n', None),
        "daemon/keeper.h": ('#include "store/bundle.h"\n#include "ipc/channel.h"\n#include <spdlog/spdlog.h>\n', None),
        "daemon/loader/main.cc": ('#include "kernels/cpu/gemm.h"\n#include "ipc/vmm.h"\n#include <cuda.h>\n', None),
        "client/mapping.h": ('#include "ipc/channel.h"\n#include "ipc/vmm.h"\n#include "kernels/cpu/gemm.h"\n#include "weightd/client.h"\n', None),
        "tests/store/support.h": ("#include <vector>\n", None),
        "tests/store/bundle_test.cc": ('#include "store/bundle.h"\n#include "support.h"\n#include <gtest/gtest.h>\n', None),
        "tools/bench/gpu/time.cc": ("#include <cuda_runtime_api.h>\n", None),
        "tools/pack/main.cc": ('#include "store/bundle.h"\n#include <CLI/CLI.hpp>\n', None),
        # Each of these breaks one rule.
        "client/base/text.h": ('#include "store/bundle.h"\n', "base may not include store"),
        "client/include/weightd/types.h": ("#include <capnp/common.h>\n", "base may not include Cap'n Proto"),
        "client/include/weightd/control.h": ("#include <sys/socket.h>\n", "public may not include POSIX and Linux"),
        "client/model.cc": ('#include "store/bundle.h"\n', "client may not include store"),
        "client/tensor.cc": ("#include <boost/asio.hpp>\n", "client may not include Asio"),
        "client/rpc.cc": ('#include "ipc/protocol.capnp.h"\n', "client may not include the generated head of ipc"),
        "client/lease.cc": ('#include "daemon/keeper.h"\n', "client may not include daemon"),
        "store/hash.cc": ("#include <cuda_runtime.h>\n", "store may not include CUDA"),
        "store/pack.cc": ('#include "kernels/cpu/gemm.h"\n', "store may not include kernels"),
        "store/f12_tile-inl.h": ("#include <fcntl.h>\n", "tile may not include POSIX and Linux"),
        "kernels/cpu/gemm.cc": ('#include "store/bundle.h"\n', "kernels may not include store"),
        "kernels/plan.cc": ('#include "ipc/channel.h"\n', "kernels may not include ipc"),
        "ipc/memfd.cc": ('#include "store/bundle.h"\n', "ipc may not include store"),
        "ipc/peer.cc": ("#include <spdlog/spdlog.h>\n", "ipc may not include spdlog, fmt"),
        "ipc/endpoint.cc": ("#include <cuda.h>\n", "ipc may not include CUDA"),
        "ipc/channel.cc": ('#include "ipc/vmm.h"\n', "ipc may not include ipc/cuda"),
        "daemon/ledger.cc": ('#include "ipc/cuda_driver.h"\n', "daemon may not include ipc/cuda"),
        "daemon/server.cc": ('#include "kernels/cpu/gemm.h"\n', "daemon may not include kernels"),
        "daemon/notify.cc": ('#include "weightd/client.h"\n', "daemon may not include public"),
        "daemon/config.cc": ("#include <cuda.h>\n", "daemon may not include CUDA"),
        "tools/bench/main.cc": ("#include <cuda_runtime_api.h>\n", "tools/deep may not include CUDA"),
        "tools/ctl/main.cc": ('#include "store/bundle.h"\n', "tools may not include store"),
        "tools/ctl/load.cc": ('#include "ipc/channel.h"\n', "tools may not include ipc"),
        "tests/reference/gemm.cc": ('#include "store/tile_layout.h"\n', "tests/reference may not include tile"),
        "tests/reference/bundle.cc": ('#include "kernels/cpu/gemm.h"\n', "tests/reference may not include kernels"),
        "store/near.cc": ('#include "bundle.h"\n', "is not written from the root, or does not exist"),
        "store/strange.cc": ("#include <leveldb/db.h>\n", "is a head of no library that the table knows"),
        "elsewhere/x.cc": ("#include <vector>\n", "lies in a folder that the table does not know"),
    }
    with tempfile.TemporaryDirectory() as root:
        for path, (text, _) in tree.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        problems, count = check(root)
    expected = {path: wrong for path, (_, wrong) in tree.items() if wrong}
    found = {line.split(":", 1)[0]: line for line in problems}
    errors = [f"{path}: not found: {wrong}" for path, wrong in expected.items() if not found.get(path, "").endswith(": " + wrong)]
    errors += [f"false alarm: {line}" for path, line in found.items() if path not in expected]
    if len(problems) != len(expected) or count != len(tree):
        errors.append(f"{len(problems)} violations in {count} files, expected {len(expected)} in {len(tree)}")
    return errors


def main(arguments):
    if arguments == ["--self-test"]:
        errors = self_test()
        print("\n".join(errors) if errors else "self-test: every planted violation was found")
        return 1 if errors else 0
    if len(arguments) != 1 or not os.path.isdir(arguments[0]):
        print(__doc__, file=sys.stderr)
        return 2
    problems, count = check(arguments[0])
    print("\n".join(problems + [f"{len(problems)} violations in {count} files"]))
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
