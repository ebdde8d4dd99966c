//! The examples' Llama against candle-transformers' own, its gradients against finite differences, both in half
//! types on every device against plain attention, and its loaders on files made up here. The tests on SmolLM2
//! run where `CANDLE_FLASH_GQA_SMOLLM2` names the GGUF file that `scripts/fetch-model.sh` fetches.

#[path = "../../examples/common/checkpoint/mod.rs"]
mod checkpoint;
#[path = "../../examples/common/data.rs"]
mod data;
#[path = "../suite/support/device.rs"]
#[expect(dead_code, reason = "the suite uses the rest")]
mod device;
mod folder;
#[path = "../../examples/common/generate.rs"]
mod generate;
mod gguf;
mod gradients;
mod greedy;
mod logits;
mod made_up;
#[path = "../../examples/common/model/mod.rs"]
#[expect(dead_code, reason = "optimiser steps are another test")]
mod model;
mod shipped;
mod smollm2;
mod tiny;
