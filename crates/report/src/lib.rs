//! Records in, pictures out. Knows no tensors: whoever has something to show makes a figure of it, and a figure becomes SVG or part of a page.
