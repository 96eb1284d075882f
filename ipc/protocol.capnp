# SPDX-License-Identifier: Apache-2.0
# The weightd wire protocol, inside the frames of ipc/frame.h. Ordinals are never reused, removed or retyped; new fields and
# union members go at the end. kProtocolVersion (ipc/frame.h) rises with every change; tests/ipc holds the recorded hash of this file.
@0xd7a1c5e2b94f3806;
using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("weightd::ipc::wire");

struct Request {
  id @0 :UInt64;            # chosen by the peer, echoed in the response; events use 0
  union {
    hello @1 :Hello;
    list @2 :Void;
    acquire @3 :Acquire;
    release @4 :UInt64;     # lease
    status @5 :Void;
    load @6 :Load;
    unload @7 :Unload;
    leases @8 :Void;
    verify @9 :Text;        # model
    version @10 :Void;
    memory @11 :Void;
    doctor @12 :Void;
  }
}

struct Response {
  id @0 :UInt64;
  union {
    error @1 :Error;
    hello @2 :HelloReply;
    models @3 :List(Model);
    acquired @4 :Acquired;
    released @5 :Void;
    status @6 :Status;
    loaded @7 :Model;
    unloaded @8 :Unloaded;
    leases @9 :List(Lease);
    verified @10 :Verified;
    version @11 :HelloReply;
    event @12 :Event;
    moreFds @13 :UInt32;    # continuation of `acquired`: this many descriptors travel with the frame
    memory @14 :Memory;
    doctor @15 :List(Check);
  }
}

struct Error { code @0 :UInt16; message @1 :Text; }

struct Hello { build @0 :Text; name @1 :Text; }
struct HelloReply {
  build @0 :Text;           # "1.2.3 (abcdef0)"
  protocolVersion @1 :UInt16;
  backend @2 :Text;         # "host" or "cuda"
  instance @3 :UInt64;      # random per daemon process: another one means that the daemon restarted
  pid @4 :Int32;
  backendReason @5 :Text;   # in status: why "auto" chose it; else empty
}

# lost: the legacy transport's owner died, and the memory with it; leases on it stand until they are released.
enum GenerationState { loading @0; verifying @1; ready @2; published @3; draining @4; freed @5; failed @6; lost @7; }

struct EncodingSum { encoding @0 :Text; tensors @1 :UInt64; logicalBytes @2 :UInt64; residentBytes @3 :UInt64; }

struct Model {
  name @0 :Text;
  generation @1 :UInt64;
  state @2 :GenerationState;
  contentId @3 :Text;       # hexadecimal
  device @4 :Text;          # GPU UUID, or "host"
  shard @5 :UInt32;
  transport @6 :Text;       # "fd" or "legacy"
  logicalBytes @7 :UInt64;
  residentBytes @8 :UInt64; # whole chunks
  tensorCount @9 :UInt64;
  leaseCount @10 :UInt32;
  orphanCount @11 :UInt32;
  progressBytes @12 :UInt64;
  failure @13 :Text;
  residency @14 :Text;      # "fast"
  source @15 :Text;         # bundle path, control socket only; empty for workers
  tensorsId @16 :Text;
  encodings @17 :List(EncodingSum);  # what the resident bytes are made of
}

struct Acquire {
  model @0 :Text;
  device @1 :Text;          # empty: the only device that has it
  waitMs @2 :UInt32;        # wait this long for the model to be published
  contentId @3 :Text;       # not empty: lease this content again (after the daemon was lost); the generation may be draining
}
struct Acquired {
  lease @0 :UInt64;
  model @1 :Model;
  arenaBytes @2 :UInt64;
  chunkBytes @3 :List(UInt64);
  fdCount @4 :UInt32;       # table first, then the chunks in order; the first 253 come with this frame, others in moreFds frames
  tableBytes @5 :UInt64;
  ipcHandle @6 :Data;       # legacy transport: the 64 bytes of a cudaIpcMemHandle_t over the whole arena; then fdCount is 1
}

struct Device {
  uuid @0 :Text;
  name @1 :Text;
  totalBytes @2 :UInt64;
  budgetBytes @3 :UInt64;
  ownedBytes @4 :UInt64;    # chunks of all generations that are not freed
  leasedBytes @5 :UInt64;   # of these: with at least one lease
  drainingBytes @6 :UInt64; # of these: draining
  orphanBytes @7 :UInt64;   # of these: held by orphans only
  loadingBytes @8 :UInt64;  # admitted and not yet published
  freeBytes @9 :UInt64;     # budget minus owned minus loading
  fdOnlyBytes @10 :UInt64;  # of the owned: kept by the daemon's descriptors alone, no lease
}
struct Status {
  version @0 :HelloReply;
  uptimeMs @1 :UInt64;
  devices @2 :List(Device);
  models @3 :List(Model);
  sessionCount @4 :UInt32;
  leaseCount @5 :UInt32;
  fdCount @6 :UInt32;       # open descriptors of the daemon
  rssBytes @7 :UInt64;
}

# What a driver says of a GPU, by a child with a deadline: a cross-check of the ledger.
struct Gpu {
  uuid @0 :Text;
  name @1 :Text;
  totalBytes @2 :UInt64;
  usedBytes @3 :UInt64;     # NVML, all processes and the driver's own; 0 with nvmlKnown false
  freeBytes @4 :UInt64;
  nvmlKnown @5 :Bool;
  minor @6 :Int32;          # of /dev/nvidia<minor>; -1: unknown
  persistence @7 :Int8;     # 1 on, 0 off, -1 unknown
  computeMajor @8 :UInt32;
  computeMinor @9 :UInt32;
  vmm @10 :Bool;            # virtual memory management
  fdHandles @11 :Bool;      # chunks can be exported as file descriptors
  readOnlyMap @12 :Int8;    # 1: a chunk was exported, imported and mapped with read access only; 0: that failed; -1: not tried
  granularityBytes @13 :UInt64;
  problem @14 :Text;        # why it cannot be used; empty: it can
}
struct Probe {
  driverVersion @0 :Text;   # "580.159.04"; empty: unknown
  cudaVersion @1 :UInt32;   # of the driver, 13000 = 13.0; 0: no driver
  gpus @2 :List(Gpu);
  problem @3 :Text;         # why there is no usable GPU; empty: there is one
  nvmlProblem @4 :Text;
}
struct Memory {
  status @0 :Status;
  leases @1 :List(Lease);
  gpus @2 :List(Gpu);       # of the devices that the daemon serves
  problem @3 :Text;         # why gpus are missing ("no answer within 2 s"); empty on the host backend
}
struct Check {
  name @0 :Text;
  level @1 :UInt16;         # 0 good, 1 warning, 2 failure
  detail @2 :Text;          # what was found
  advice @3 :Text;          # what to do about it; empty when good
}

struct Load {
  model @0 :Text;
  path @1 :Text;            # absolute
  device @2 :Text;
  timeoutMs @3 :UInt32;     # 0: the daemon's stall limit only
  transport @4 :Text;       # "fd" (also when empty) or "legacy"
}
struct Unload { model @0 :Text; device @1 :Text; timeoutMs @2 :UInt32; }
struct Unloaded { freed @0 :Bool; bytes @1 :UInt64; holders @2 :List(Lease); }
struct Lease {
  id @0 :UInt64;
  model @1 :Text;
  generation @2 :UInt64;
  contentId @3 :Text;
  pid @4 :Int32;            # 0: unknown (foreign PID namespace)
  uid @5 :UInt32;
  command @6 :Text;
  ageMs @7 :UInt64;
  bytes @8 :UInt64;
  orphan @9 :Bool;
  device @10 :Text;
}
struct Verified { blocks @0 :UInt64; badBlocks @1 :List(UInt64); badTensors @2 :List(Text); elapsedMs @3 :UInt64; bytes @4 :UInt64; }

struct Event {
  union {
    published @0 :Model;
    drainRequested @1 :Model;
    shuttingDown @2 :Void;
    lost @3 :Model;         # legacy transport: the memory is gone, whoever computes on it fails
  }
}

# --- loader <-> daemon, over a socketpair --------------------------------------------------------------------------------

struct LoaderMessage {
  union {
    job @0 :Job;            # daemon -> loader, first message; fd: the bundle (load), or table and chunks (verify)
    planned @1 :Planned;    # loader -> daemon
    admitted @2 :Void;      # daemon -> loader: allocate
    chunks @3 :UInt32;      # loader -> daemon: this many chunk fds travel with the frame
    received @4 :UInt32;    # daemon -> loader: so many chunk fds are held so far
    progress @5 :UInt64;    # loader -> daemon: bytes done
    verified @6 :LoadResult; # loader -> daemon; fd: the table
    failed @7 :Error;       # loader -> daemon
    scrubbed @8 :Verified;  # loader -> daemon: the answer to a verify job
    moreFds @9 :UInt32;     # daemon -> loader: further fds of the job
    probed @10 :Probe;      # loader -> daemon: the answer to a probe job
  }
}
struct Job {
  union { load @0 :Void; verify @1 :Void; probe @11 :Probing; }
  backend @2 :Text;
  device @3 :Text;
  residency @4 :Text;
  chunkBytes @5 :UInt64;    # most bytes of one chunk
  threads @6 :UInt32;
  bundleName @7 :Text;      # for messages
  fdCount @8 :UInt32;
  chunkSizes @9 :List(UInt64);  # verify
  arenaBytes @10 :UInt64;       # verify
  transport @12 :Text;          # load: "fd" or "legacy"; a legacy loader stays after `verified`, as the owner, until its socket closes
}
# deep: also try a chunk on every GPU (makes a context for a moment); else what the driver says without one.
struct Probing { deep @0 :Bool; }
struct Planned {
  contentId @0 :Text;
  tensorsId @1 :Text;
  arenaBytes @2 :UInt64;
  residentBytes @3 :UInt64; # whole chunks at the device's granularity
  logicalBytes @4 :UInt64;
  tensorCount @5 :UInt64;
  chunkCount @6 :UInt32;
  encodings @7 :List(EncodingSum);
  availableBytes @8 :UInt64; # what the device's driver can still give; 0: not known
}
struct LoadResult {
  chunkSizes @0 :List(UInt64);
  tableBytes @1 :UInt64;
  blocks @2 :UInt64;
  elapsedMs @3 :UInt64;
  ipcHandle @4 :Data;       # legacy
}

# --- tensor table: one flat message in a sealed memfd, made by the loader, read by clients and verifiers ------------------

struct TensorTable {
  contentId @0 :Text;
  residency @1 :Text;
  arenaBytes @2 :UInt64;
  poolOffsetBytes @3 :UInt64;
  poolBytes @4 :UInt64;
  storages @5 :List(StorageEntry);
  tensors @6 :List(TensorEntry);
  blockHashes @7 :List(UInt64);
}
struct StorageEntry {
  name @0 :Text;
  encoding @1 :UInt16;
  dtype @2 :UInt16;
  merged @3 :Bool;
  n @4 :UInt64;
  k @5 :UInt64;
  batch @6 :UInt64;
  logicalBytes @7 :UInt64;
  dataOffset @8 :UInt64;     # raw: the bytes; f12: the codes plane
  windowsOffset @9 :UInt64;
  recordsOffset @10 :UInt64;
  residentBytes @11 :UInt64; # all planes, its part of the pool included
  dataBytes @12 :UInt64;     # sizes of the planes at the offsets above
  windowsBytes @13 :UInt64;
  recordsBytes @14 :UInt64;
}
struct TensorEntry {
  name @0 :Text;
  dtype @1 :UInt16;
  shape @2 :List(UInt64);
  storage @3 :UInt32;
  rowBegin @4 :UInt64;
}
