//! The loss curve as a PNG image.

use std::path::{self, Path};
use std::sync::Once;

use anyhow::{Result, anyhow, ensure};
use plotters::prelude::*;

use crate::losses::Row;

/// Checks, before any work, that [`draw`] can write there; `out` is a folder that will be made.
pub fn check(path: &Path, out: Option<&Path>) -> Result<()> {
    let extension = path.extension().unwrap_or_default();
    ensure!(
        extension.eq_ignore_ascii_case("png"),
        "--plot {}: the image is a PNG; give a name that ends in .png",
        path.display()
    );
    let absolute = path::absolute(path)?;
    ensure!(
        !absolute.is_dir(),
        "--plot {} is a folder; give the name of a file",
        path.display()
    );
    let folder = absolute.parent().unwrap_or(&absolute);
    let made = out.map(path::absolute).transpose()?;
    ensure!(
        made.as_ref() != Some(&absolute),
        "--plot and --out are both {}; give the image another name",
        path.display()
    );
    ensure!(
        folder.is_dir() || made.is_some_and(|out| out.starts_with(folder)),
        "--plot {}: the folder does not exist; make it or name another",
        path.display()
    );
    Ok(())
}

/// Draws the loss of every step and, where it was measured, on the held-out text.
pub fn draw(path: &Path, rows: &[Row]) -> Result<()> {
    ensure!(
        !rows.is_empty(),
        "cannot draw {}: no step was taken",
        path.display()
    );
    register_font();
    try_draw(path, rows).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn try_draw(path: &Path, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let train: Vec<(f64, f64)> = rows
        .iter()
        .map(|row| (row.step.step as f64, f64::from(row.step.loss)))
        .collect();
    let held_out: Vec<(f64, f64)> = rows
        .iter()
        .filter_map(|row| Some((row.step.step as f64, f64::from(row.held_out_loss?))))
        .collect();
    let losses = || train.iter().chain(&held_out).map(|point| point.1);
    let (lowest, highest) = (
        losses().fold(f64::MAX, f64::min),
        losses().fold(f64::MIN, f64::max),
    );
    let margin = (highest - lowest).max(0.1) * 0.05;
    let (first, last) = (train[0].0, train[train.len() - 1].0);

    let root = BitMapBackend::new(path, (900, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption("Loss by step", ("sans-serif", 22))
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(
            first..last.max(first + 1.),
            lowest - margin..highest + margin,
        )?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("cross-entropy per token (nats)")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.2}"))
        .label_style(("sans-serif", 15))
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    chart
        .draw_series(LineSeries::new(train, &BLUE))?
        .label("training")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLUE));
    if !held_out.is_empty() {
        chart
            .draw_series(LineSeries::new(held_out, RED.stroke_width(2)).point_size(3))?
            .label("held out")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], RED));
    }
    chart
        .configure_series_labels()
        .label_font(("sans-serif", 15))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(root.present()?)
}

/// Gives plotters a font that travels with the program.
fn register_font() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let font = epaint_default_fonts::UBUNTU_LIGHT;
        // Only a broken font is refused; the labels would then be missing from the image.
        let _ = plotters::style::register_font("sans-serif", FontStyle::Normal, font);
    });
}
