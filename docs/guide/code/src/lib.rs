//! The drawings of the guide: decided by the library on a given clock, or from what the benchmarks
//! have measured.

use std::error::Error;

mod burst;
mod dashboard;
mod data;
mod outage;
mod reservation;
mod speed;
mod svg;
mod throughput;
#[cfg(not(target_family = "wasm"))]
mod way;

pub use burst::Scene;

/// A drawing, and the name of its file.
#[derive(Debug)]
pub struct Drawing {
    /// The file below `docs/guide/src/images`.
    pub file: String,
    /// The text of the file.
    pub svg: String,
}

impl Drawing {
    /// A drawing for a wide page and for a narrow one, drawn by whether it is wide.
    fn both(
        name: &str,
        draw: impl Fn(bool) -> Result<String, Box<dyn Error>>,
    ) -> Result<[Self; 2], Box<dyn Error>> {
        let wide = Self { file: format!("{name}.svg"), svg: draw(true)? };
        let narrow = Self { file: format!("{name}-narrow.svg"), svg: draw(false)? };
        Ok([wide, narrow])
    }
}

/// All drawings of the guide.
///
/// # Errors
/// A file of measurements is not there, or not as the benchmarks write it.
pub fn drawings() -> Result<Vec<Drawing>, Box<dyn Error>> {
    let mut drawings = burst::drawings()?;
    for more in [
        speed::drawings,
        reservation::drawings,
        outage::drawings,
        throughput::drawings,
        #[cfg(not(target_family = "wasm"))]
        way::drawings,
        dashboard::drawings,
    ] {
        drawings.extend(more()?);
    }
    Ok(drawings)
}
