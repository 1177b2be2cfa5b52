//! [`Named`]: values that a user chooses by name.

/// A value that a user chooses by name, such as on a command line.
pub trait Named: Copy + Sized + 'static {
    /// All values, in the order in which they are shown.
    const ALL: &'static [Self];

    /// The name.
    fn name(self) -> &'static str;

    /// A line of help.
    fn about(self) -> &'static str;
}

/// Writes an enum whose variants have names. Their documentation is the help.
macro_rules! named {
    (
        $(#[$of_all:meta])*
        pub enum $all:ident {
            $(#[doc = $about:literal] $name:literal => $variant:ident $(= $number:literal)?,)+
        }
    ) => {
        $(#[$of_all])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $all {
            $(#[doc = $about] $variant $(= $number)?,)+
        }

        impl $crate::named::Named for $all {
            const ALL: &'static [Self] = &[$(Self::$variant),+];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            fn about(self) -> &'static str {
                match self {
                    $(Self::$variant => $about.trim_ascii().trim_end_matches('.'),)+
                }
            }
        }
    };
}

pub(crate) use named;
