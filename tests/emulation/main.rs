//! The attention kernels on the CPU: each compiled instance as C++ on an emulated multiprocessor (machine.h), over
//! shapes on and off every tile edge, against the formula in double precision.
//!
//! It needs a C++ compiler, but no GPU, and takes the code for GPUs of compute capability 8.x where there is one.
//! What it can't show is how the compiler for GPUs translates the kernels, their speed, and the instructions
//! themselves, which are written here again from their manual (ptx/).
#![cfg(target_os = "linux")]

#[path = "../../src/cuda/instances.rs"]
#[macro_use]
mod instances;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The line of launch.cuh that is no C++, and what stands for it.
const LAUNCH: [&str; 2] = [
    "kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params);",
    "emulate(kernel, static_cast<unsigned>(blocks), threads, shared_bytes, params);",
];

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Copies a folder of kernels/ and everything below.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}

/// kernels/ with the emulated instructions, for one instance.
fn sources(symbol: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let ours = package.join("tests/emulation");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("emulation")
        .join(symbol);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    let kernels = folder.join("kernels");
    copy(&package.join("kernels"), &kernels);
    copy(&ours.join("ptx"), &kernels.join("ptx"));
    std::fs::copy(ours.join("element.cuh"), kernels.join("common/element.cuh")).unwrap();
    let launch = kernels.join("launch.cuh");
    let text = read(&launch);
    assert_eq!(text.matches(LAUNCH[0]).count(), 1, "{}", launch.display());
    std::fs::write(&launch, text.replace(LAUNCH[0], LAUNCH[1])).unwrap();
    folder
}

/// Compiles an instance with `program` and the other kernels that it calls, and runs it.
fn emulate(program: &str, others: &[&str], row: (&str, &str, &str, u32, &str)) {
    let (file, symbol, head_dim, shared_kib, modes) = row;
    let folder = sources(symbol);
    let executable = folder.join("run");
    let compiler = std::env::var_os("CXX").unwrap_or("c++".into());
    let mut command = Command::new(&compiler);
    command
        .args(["-std=c++20", "-O2", "-w", "-Wno-psabi", "-x", "c++"])
        .arg(format!("-DHEAD_DIM={head_dim}"))
        .arg(format!("-DSHARED_KIB={shared_kib}"))
        .arg(format!("-DSYMBOL={symbol}"))
        // What no GPU of 8.x can run is for Hopper.
        .arg(format!(
            "-DEMULATED_ARCH={}",
            if shared_kib > 163 { 900 } else { 800 }
        ));
    if modes == "Plain" {
        command.arg("-DPLAIN_ONLY");
    }
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulation");
    command
        .arg("-I")
        .arg(&ours)
        .arg("-I")
        .arg(&folder)
        .args(["-isystem", env!("FLASH_CUDA_INCLUDE")])
        .arg("-include")
        .arg(ours.join("language.h"))
        .arg(ours.join(program));
    for file in others.iter().chain([&file]) {
        command.arg(folder.join("kernels").join(file));
    }
    let output = command
        .arg("-o")
        .arg(&executable)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", compiler.display()));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let output = Command::new(&executable).output().unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
}

macro_rules! forward_tests {
    ($($file:literal, $symbol:ident, $head_dim:literal, $shared_kib:literal, $modes:ident;)*) => {
        $(#[test]
        fn $symbol() {
            let row = ($file, stringify!($symbol), stringify!($head_dim), $shared_kib, stringify!($modes));
            emulate("forward.cpp", &[], row);
        })*
    };
}
macro_rules! backward_tests {
    ($($file:literal, $symbol:ident, $head_dim:literal, $shared_kib:literal, $modes:ident;)*) => {
        $(#[test]
        fn $symbol() {
            let row = ($file, stringify!($symbol), stringify!($head_dim), $shared_kib, stringify!($modes));
            emulate("backward.cpp", &["common/delta.cu", "common/convert.cu"], row);
        })*
    };
}
instances!(forward_tests, backward_tests);
