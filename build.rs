//! Compiles kernels/ into one static library, for the feature `cuda` only.
//!
//! Each row of src/cuda/instances.rs is one object, so that they compile side by side and only what
//! changed is compiled again. No GPU is asked for anything: the machine code is the same for all.

#[cfg(feature = "cuda")]
#[path = "src/cuda/instances.rs"]
#[macro_use]
mod instances;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    if let Err(message) = cuda::build() {
        // One line, without the backtrace of a panic.
        println!("cargo::error={message}");
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A file of kernels/ with what it is compiled for.
    #[derive(Debug)]
    struct Unit {
        file: &'static str,
        name: &'static str,
        defines: Vec<&'static str>,
        target: Target,
    }

    /// The GPUs that a unit is for.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Target {
        /// From compute capability 8.0 on.
        Sm80,
        /// From 9.0 on.
        Sm90,
        /// 9.0 alone, with the instructions that only it has.
        Sm90a,
    }

    fn units() -> Vec<Unit> {
        let mut units = Vec::new();
        for (file, name) in [
            ("common/delta.cu", "flash_delta"),
            ("common/convert.cu", "flash_convert"),
            ("common/layout.cu", "flash_layout"),
            ("training/adamw.cu", "flash_adamw"),
            ("training/cross_entropy.cu", "flash_cross_entropy"),
            ("training/embedding.cu", "flash_embedding"),
            ("training/grads.cu", "flash_grads"),
            ("training/layout.cu", "flash_training_layout"),
            ("training/rms_norm.cu", "flash_rms_norm"),
            ("training/rope.cu", "flash_rope"),
            ("training/swiglu.cu", "flash_swiglu"),
        ] {
            units.push(Unit {
                file,
                name,
                defines: Vec::new(),
                target: Target::Sm80,
            });
        }
        macro_rules! add {
            ($($file:literal, $symbol:ident, $head_dim:literal, $shared_kib:literal, $modes:ident;)*) => {
                $({
                    let mut defines = vec![
                        concat!("-DHEAD_DIM=", $head_dim),
                        concat!("-DSHARED_KIB=", $shared_kib),
                    ];
                    if stringify!($modes) == "Plain" {
                        defines.push("-DPLAIN_ONLY");
                    }
                    units.push(Unit {
                        file: $file,
                        name: stringify!($symbol),
                        defines,
                        target: if $file.starts_with("sm90/") {
                            Target::Sm90a
                        } else if $shared_kib > 163 {
                            // No GPU of 8.x has more for a block.
                            Target::Sm90
                        } else {
                            Target::Sm80
                        },
                    });
                })*
            };
        }
        instances!(add, add);
        units
    }

    pub fn build() -> Result<(), String> {
        println!("cargo::rerun-if-changed=kernels");
        println!("cargo::rerun-if-changed=src/cuda/instances.rs");
        for variable in [
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_ROOT",
            "CUDA_TOOLKIT_ROOT_DIR",
            "NVCC_CCBIN",
            "PATH",
        ] {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        let toolkit = find_toolkit()?;
        // For tests/emulation.
        println!(
            "cargo::rustc-env=FLASH_CUDA_INCLUDE={}",
            toolkit.join("include").display()
        );
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(
            std::iter::once(toolkit.join("bin")).chain(std::env::split_paths(&path)),
        )
        .map_err(|error| format!("PATH: {error}"))?;
        // SAFETY: no other thread of this process is running yet.
        unsafe {
            // bindgen_cuda calls `nvcc` by that name.
            std::env::set_var("PATH", path);
            // Without it bindgen_cuda asks nvidia-smi.
            std::env::set_var("CUDA_COMPUTE_CAP", "80");
        }

        let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
        let headers =
            headers(Path::new("kernels")).map_err(|error| format!("kernels/: {error}"))?;
        let units = units();
        let nvcc = toolkit.join("bin").join("nvcc");
        let version = nvcc_version(&nvcc)?;
        let started = std::time::SystemTime::now();
        let next = AtomicUsize::new(0);
        let failures = Mutex::new(Vec::new());
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        // What cargo may use, by -j.
        let jobs = std::env::var("NUM_JOBS")
            .ok()
            .and_then(|jobs| jobs.parse().ok());
        let threads = jobs.map_or(threads, |jobs: usize| threads.min(jobs.max(1)));
        // bindgen_cuda panics if nvcc fails, after nvcc has said why.
        std::thread::scope(|scope| {
            for _ in 0..threads.min(units.len()) {
                scope.spawn(|| {
                    while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let compile = || compile(unit, &version, &out, &headers);
                        if std::panic::catch_unwind(compile).is_err()
                            && let Ok(mut failures) = failures.lock()
                        {
                            failures.push(unit.name);
                        }
                    }
                });
            }
        });
        let failures = failures.into_inner().unwrap_or_default();
        if !failures.is_empty() {
            try_nvcc(&nvcc, &version, &out)?;
            println!(
                "cargo::error=nvcc failed for {}: what it said is below",
                failures.join(", ")
            );
            // cargo shows what was printed only where the script fails.
            std::process::exit(1);
        }

        // For scripts/kernel-report.py: how many were compiled, and in how many seconds.
        let compiled = units.iter().filter(|unit| {
            let written = std::fs::metadata(library(&out, unit)).and_then(|file| file.modified());
            written.is_ok_and(|written| written >= started)
        });
        let (compiled, seconds) = (compiled.count(), started.elapsed().unwrap_or_default());
        if compiled > 0 {
            let report = format!("{compiled} {:.0}", seconds.as_secs_f64());
            std::fs::write(out.join("compiled"), report)
                .map_err(|error| format!("OUT_DIR: {error}"))?;
        }

        println!("cargo::rustc-link-search=native={}", out.display());
        for unit in &units {
            println!("cargo::rustc-link-lib=static={}", unit.name);
        }
        for folder in ["lib64", "lib", "lib64/stubs", "lib/stubs", "lib/x64"] {
            let folder = toolkit.join(folder);
            if folder.is_dir() {
                println!("cargo::rustc-link-search=native={}", folder.display());
            }
        }
        println!("cargo::rustc-link-lib=dylib=cudart");
        Ok(())
    }

    fn compile(unit: &Unit, nvcc: &str, out: &Path, headers: &[PathBuf]) {
        // A folder of its own: bindgen_cuda names objects by the source alone.
        let folder = out.join(unit.name);
        if let Err(error) = std::fs::create_dir_all(&folder) {
            panic!("{}: {error}", folder.display());
        }
        // bindgen_cuda compiles again what is older than a file that it watches: this one is new where the flags or the
        // compiler are.
        let stamp = folder.join("stamp");
        let flags = format!("{nvcc}{unit:?}{}", include_str!("build.rs"));
        if std::fs::read_to_string(&stamp).ok().as_deref() != Some(&flags)
            && let Err(error) = std::fs::write(&stamp, flags)
        {
            panic!("{}: {error}", stamp.display());
        }
        let mut watched: Vec<PathBuf> = headers
            .iter()
            .filter(|header| may_include(unit, header))
            .cloned()
            .collect();
        watched.push(stamp);
        let mut builder = bindgen_cuda::Builder::default()
            .compute_cap(if unit.target == Target::Sm90 { 90 } else { 80 })
            .kernel_paths(vec![Path::new("kernels").join(unit.file)])
            .watch(watched)
            .out_dir(folder)
            .arg("-std=c++17")
            .arg("-O3");
        builder = match unit.target {
            // compute_cap asks for its own code and PTX. For what is newer than Hopper all units need PTX of the same
            // architecture: what one kernel leaves in memory for the next is laid out by architecture (AccLayout).
            Target::Sm80 => builder.arg("-gencode=arch=compute_90,code=[sm_90,compute_90]"),
            Target::Sm90 => builder,
            // bindgen_cuda can't say `90a`. What it asks for besides is for 8.0, so that a Hopper GPU has no choice;
            // the kernels are empty there.
            Target::Sm90a => builder.arg("-gencode=arch=compute_90a,code=sm_90a"),
        };
        if !cfg!(target_env = "msvc") {
            builder = builder.arg("-Xcompiler").arg("-fPIC");
        }
        for define in &unit.defines {
            builder = builder.arg(define);
        }
        builder.build_lib(library(out, unit));
    }

    fn library(out: &Path, unit: &Unit) -> PathBuf {
        out.join(format!("lib{}.a", unit.name))
    }

    /// Whether a change to a header compiles the unit again: files of these folders are for their own units alone.
    fn may_include(unit: &Unit, header: &Path) -> bool {
        ["sm80", "sm90", "training"].iter().all(|folder| {
            Path::new(unit.file).starts_with(folder)
                || !header.starts_with(Path::new("kernels").join(folder))
        })
    }

    fn nvcc_version(nvcc: &Path) -> Result<String, String> {
        let output = std::process::Command::new(nvcc).arg("--version").output();
        let output = output.map_err(|error| format!("{}: {error}", nvcc.display()))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Compiles nothing, for the newest architecture: says in one line what is missing besides nvcc, if that is why
    /// kernels were not compiled.
    fn try_nvcc(nvcc: &Path, version: &str, out: &Path) -> Result<(), String> {
        let source = out.join("nothing.cu");
        std::fs::write(&source, "__global__ void nothing() {}\n")
            .map_err(|error| format!("{}: {error}", source.display()))?;
        let mut command = std::process::Command::new(nvcc);
        command.args(["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-c"]);
        if let Some(compiler) = std::env::var_os("NVCC_CCBIN") {
            // As bindgen_cuda calls it.
            command
                .arg("-allow-unsupported-compiler")
                .arg("-ccbin")
                .arg(compiler);
        }
        command.arg("-o").arg(out.join("nothing.o")).arg(&source);
        let output = command.output().map_err(|error| format!("nvcc: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        let said = [output.stderr, output.stdout].concat();
        let said = String::from_utf8_lossy(&said);
        let release = version.lines().find(|line| line.contains("release"));
        Err(format!(
            "the feature `cuda` needs nvcc of CUDA 12 or 13 and a C++17 compiler for it (on PATH, or named by $NVCC_CCBIN); {} ({}) says: {}",
            nvcc.display(),
            release.unwrap_or("of no known release").trim(),
            said.lines()
                .find(|line| !line.trim().is_empty())
                .unwrap_or("nothing")
        ))
    }

    /// Every header below a folder.
    fn headers(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
        let mut headers = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                headers.extend(self::headers(&path)?);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "cuh" || extension == "h")
            {
                headers.push(path);
            }
        }
        Ok(headers)
    }

    /// The folder that has bin/nvcc.
    fn find_toolkit() -> Result<PathBuf, String> {
        let named = [
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_ROOT",
            "CUDA_TOOLKIT_ROOT_DIR",
        ]
        .into_iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let on_path: Vec<PathBuf> = std::env::split_paths(&path)
            .filter_map(|bin| bin.parent().map(Path::to_path_buf))
            .collect();
        let standard = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda"].map(PathBuf::from);
        named
            .chain(on_path)
            .chain(standard)
            .find(|toolkit| toolkit.join("bin").join(format!("nvcc{}", std::env::consts::EXE_SUFFIX)).is_file())
            .ok_or_else(|| {
                "the feature `cuda` needs nvcc, and none is in $CUDA_HOME/bin, on PATH or in /usr/local/cuda: install the CUDA toolkit, or run scripts/cuda-toolkit.sh of the repository, which fetches one from PyPI"
                    .to_string()
            })
    }
}
