//! Training through the op: its loss curve against plain attention's and from device to device, resumed runs,
//! adapters, and what happens when the loss is no longer a number.

#[path = "../../examples/finetune/args.rs"]
mod args;
#[path = "../../examples/finetune/batches.rs"]
mod batches;
#[path = "../../examples/common/checkpoint/mod.rs"]
mod checkpoint;
#[path = "../../examples/common/cli.rs"]
#[expect(dead_code, reason = "the tests choose devices themselves")]
mod cli;
mod command;
#[path = "../../examples/finetune/compare.rs"]
mod compare;
mod curves;
#[path = "../suite/support/device.rs"]
#[expect(dead_code, reason = "a run here has a device of its own")]
mod device;
mod devices;
#[path = "../../examples/common/generate.rs"]
mod generate;
#[path = "../../examples/finetune/losses.rs"]
mod losses;
#[path = "../../examples/common/model/mod.rs"]
mod model;
#[path = "../../examples/common/numbers.rs"]
mod numbers;
#[path = "../../examples/finetune/options.rs"]
mod options;
#[path = "../../examples/common/out_of_memory.rs"]
mod out_of_memory;
#[path = "../../examples/finetune/output.rs"]
mod output;
#[path = "../../examples/finetune/plot.rs"]
mod plot;
mod resumed;
#[path = "../../examples/finetune/run.rs"]
mod run;
#[path = "../../examples/finetune/run_dir.rs"]
mod run_dir;
mod saved;
#[path = "../../examples/finetune/scratch.rs"]
mod scratch;
mod setup;
mod steps;
#[path = "../../examples/finetune/trainer.rs"]
mod trainer;
#[path = "../../examples/common/training/mod.rs"]
mod training;
#[path = "../../examples/finetune/weights.rs"]
mod weights;
