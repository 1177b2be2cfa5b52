//! Writes the drawings of the guide into `docs/guide/src/images`.
//!
//! `cargo run -p guide`

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/images");
    std::fs::create_dir_all(&folder)?;
    for drawing in guide::drawings()? {
        let path = folder.join(&drawing.file);
        std::fs::write(&path, drawing.svg)?;
        println!("{}", path.display());
    }
    Ok(())
}
