//! Whether colours stand out from one another, as WCAG 2 defines it.

/// The relative luminance of a colour such as `#1a2b3c`.
fn luminance(colour: &str) -> f64 {
    let part = |place: usize| {
        let part = u8::from_str_radix(&colour[place..place + 2], 16).expect("a colour");
        let part = f64::from(part) / 255.0;
        if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
}

/// Checks that each pair of a style's colours, which it names as `--ink: #1f2933`, has at least
/// this contrast.
pub fn stand_out(style: &str, pairs: &[(&str, &str, f64)]) {
    let colour = |name: &str| {
        let (_, rest) = style.split_once(&format!("--{name}: ")).expect(name);
        luminance(&rest[..7])
    };
    for (front, back, least) in pairs {
        let (a, b) = (colour(front), colour(back));
        let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
        assert!(contrast >= *least, "--{front} on --{back}: {contrast:.2} in {style}");
    }
}
