# SPDX-License-Identifier: Apache-2.0
# The manifest of a bundle. Normative text: store/FORMAT.md, section 4. Ordinals are never reused, removed or retyped.
@0xb3f0a6d2c81e4795;
using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("weightd::store::wire");

struct Manifest {
  toolVersion @0 :Text;
  tensorsId @1 :Data;
  sources @2 :List(Source);
  sections @3 :List(Section);
  storages @4 :List(Storage);
  tensors @5 :List(Tensor);
  residencies @6 :List(Residency);
  leftOutFiles @7 :List(Text);
}

struct Source {
  name @0 :Text;
  fileBytes @1 :UInt64;
  sha256 @2 :Data;
  headerSection @3 :UInt32;
  isIndex @4 :Bool;
}

struct Section {
  offsetBytes @0 :UInt64;
  sizeBytes @1 :UInt64;
  xxh128Low @2 :UInt64;
  xxh128High @3 :UInt64;
  sha256 @4 :Data;
}

struct Storage {
  name @0 :Text;
  encoding @1 :UInt16;
  dtype @2 :UInt16;
  merged @3 :Bool;
  resident @4 :Bool;
  n @5 :UInt64;
  k @6 :UInt64;
  batch @7 :UInt64;
  logicalBytes @8 :UInt64;
  planes @9 :List(Plane);
  escapes @10 :UInt64;
  listedGroups @11 :UInt64;
  denseGroups @12 :UInt64;
}

struct Plane {
  section @0 :UInt32;
  kind @1 :UInt16;
}

struct Tensor {
  name @0 :Text;
  shape @1 :List(UInt64);
  dtype @2 :UInt16;
  indexed @3 :Bool;
  storage @4 :UInt32;
  rowBegin @5 :UInt64;
  source @6 :UInt32;
  sourceOffsetBytes @7 :UInt64;
  logicalBytes @8 :UInt64;
  xxh128Low @9 :UInt64;
  xxh128High @10 :UInt64;
}

struct Residency {
  form @0 :Text;
  arenaBytes @1 :UInt64;
  poolOffsetBytes @2 :UInt64;
  poolBytes @3 :UInt64;
  placements @4 :List(Placement);
  blockHashes @5 :List(UInt64);
}

struct Placement {
  storage @0 :UInt32;
  kind @1 :UInt16;
  arenaOffsetBytes @2 :UInt64;
  sizeBytes @3 :UInt64;
}
