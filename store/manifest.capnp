# SPDX-License-Identifier: Apache-2.0
@0xb3f0a6d2c81e4795;
using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("weightd::store::wire");
struct Manifest { toolVersion @0 :Text; }
